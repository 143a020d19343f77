"""What to say of a name that is not there: install this package, or did you mean that (torch-free).

``catalogue.json`` lists what the documents and this repository's distributions have, installed or not. It is generated
by ``make catalogue`` from the entry points of every distribution; a test holds it current. It is read when something is
asked for that is not installed, and this module is imported then.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ds_core.errors import Problem, did_you_mean

__all__ = ["documented", "find_elsewhere", "install", "known", "missing", "offered_by"]


@functools.cache
def _catalogue() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
    return found


def known(kind: str) -> frozenset[str]:
    """Every name of a kind ("sections", "optimizers", "schedulers", "state_stores", "commands")."""
    return frozenset(_catalogue().get(kind, ()))


def offered_by(kind: str, name: str) -> str | None:
    """The distribution of this repository that offers `name` (in any case); None when none does."""
    return _find(_catalogue().get(kind, {}), name)


def documented() -> Mapping[str, Mapping[str, Any]]:
    """Documented section -> what is known of it.

    owner: its distribution; "" where ``why`` says why there is none, and what to use. switch, off: the key that turns
    it off, and the values that do, where that is not ``enabled`` and false. infinity_is_null: Infinity, which some
    integrations write, is read as null. keys: key -> null, or the keys below it; ``*`` matches any name.
    """
    return _catalogue()["documented"]


def install(dist: str) -> str:
    """How to install a distribution, to go into a sentence. Those of this repository are published nowhere yet."""
    folders = _catalogue()["folders"].get(dist)  # those of the packages that it needs, then its own
    if folders is None:
        return f"`pip install {dist}`"
    return f"`pip install {' '.join(f'./{folder}' for folder in folders.split())}` in a checkout of ds_core"


def missing(
    kind: str, name: str, installed: Iterable[str] = (), *, path: str = "", instead: str = "", more: str = ""
) -> Problem:
    """Nobody who is installed offers `name`: who would, or which name is like it. `str` of it is an error message.

    kind: as in `known`, where there is more to know. installed: the names that there are. path: the config key.
    instead: what else can be done, if not to take one of `installed`. more: goes to the end, as `Plugins.quarantined`.
    """
    what, names = kind.removesuffix("s").replace("_", " "), sorted(installed)
    fix = instead or f"installed: {', '.join(names) or 'none'}"
    if dist := offered_by(kind, name):
        message = f"{what} {name!r} is served by {dist}, which is not installed"
        fix = f"install it with {install(dist)}"
    else:
        message = f"no {what} is called {name!r}"
        fix = f"{did_you_mean(name, [*names, *sorted(known(kind))])} {fix}".strip()
    return Problem(path, message, fix + more)


def find_elsewhere(engine: Any, name: str, error: AttributeError) -> Any:
    """The method `name` of an installed backend (`ds_engine_methods`), where neither the engine nor its module has it.

    Raises AttributeError where there is none: `error`, which the engine's module raised, or a better one.
    """
    module, plugins = engine.module, engine.ctx.plugins
    if hasattr(type(module), name) or str(error) != f"{type(module).__name__!r} object has no attribute {name!r}":
        raise error  # a property of the model's that failed, or a model that has words of its own
    given = plugins.merged("ds_engine_methods", installed=True, newer_than=plugins.members())
    if (answer := given.get(name)) is not None:
        return functools.partial(answer.resolve(answer.value, f"engine.{name}"), engine)
    text = f"neither the engine nor its module, a {type(module).__name__}, has an attribute {name!r}"
    instead = _catalogue()["engine"].get(name)
    if instead is None and name in type(engine.config.core).model_fields:
        instead = f"it is engine.config.core.{name}"
    elif instead is None and offered_by("engine_methods", name) is not None:
        instead = str(missing("engine_methods", name))
    # With name and obj Python looks for similar names by itself, when the error is shown.
    raise AttributeError(f"{text}: {instead}" if instead else text, name=name, obj=engine) from None


def _find(rows: Mapping[str, str], name: str) -> str | None:
    return next((dist for known, dist in rows.items() if known.lower() == name.lower()), None)
