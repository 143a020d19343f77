"""All that is wrong with a config at once, though it is checked in stages (torch-free).

A stage that fails ends the check. So the check is repeated without the keys that are wrong, which
shows what is wrong in later stages.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

from ds_command_kit.environment import environment
from ds_command_kit.overrides import VARIABLE

from ds_core.config import ConfigSource
from ds_core.config.build import plugin_settings
from ds_core.errors import ConfigError, DSError, PluginError, Problem, join
from ds_core.plugins import Plugins

T = TypeVar("T")
ENOUGH = 100
"""Problems, after which a check is not repeated."""


def with_every_problem(make: Callable[[ConfigSource], T], source: ConfigSource) -> T:
    """What `make` gives of a config.

    Raises the error of `make`, or one ConfigError with the problems of all stages in the order of
    the file; without those that are there because of an earlier one.
    """
    given = source.overridden()
    with environment({VARIABLE: None}):
        try:
            return make(given)
        except DSError as error:
            found = _collect(make, given, error)
            if not found:
                raise
    raise ConfigError(_in_order(found, given.raw), given.origin)


def _collect(
    make: Callable[[ConfigSource], object], given: ConfigSource, error: DSError
) -> list[Problem]:
    """The problems of the first error and of all that come without them; none where it names no
    key.
    """
    rest = copy.deepcopy(given.raw)
    found: dict[str, Problem] = {}
    gone: set[str] = set()
    problems = [*given.problems] or _problems(error, rest)
    while len(found) < ENOUGH:
        for problem in problems:
            if not _follows(problem, gone, rest):
                found.setdefault(problem.path, problem)
        wrong = {path.partition("[")[0] for p in problems for path in p.path.split(", ")}
        # The inner ones first: what is gone already is sought in the section around it.
        cut = {_remove(path, rest) for path in sorted(wrong, key=len, reverse=True)} - {""}
        if not cut:
            break
        # Nothing asks for a key that is unknown, but for the one that it stands for.
        unknown = {p.path for p in problems if p.message.startswith("unknown key")}
        gone |= (cut - unknown) | (_meant(problems) - rest.keys())
        try:
            make(ConfigSource(copy.deepcopy(rest), given.origin))
            break
        except DSError as later:
            problems = _problems(later, rest)
    return [*found.values()] if any(found) else []


# -- problems of errors ----------------------------------------------------------------------------


def _problems(error: DSError, config: Mapping[str, Any]) -> list[Problem]:
    """What is wrong, by its key."""
    if isinstance(error, ConfigError):
        return [*error.problems]
    text = str(error)
    plugins = config.get("plugins", {})
    found: list[Problem] = []
    if "plugins.require: " in text:
        found += _each_of(plugins["require"], "require")
    if "(loaded by plugins.load, " in text:
        found += _each_of(plugins if isinstance(plugins, list) else plugins["load"], "load")
    if found:
        return [*found, *_disabled_in_vain(plugins)]
    path, _, message = text.partition(": ")
    if _has(path, config):
        return [Problem(path, message)]
    # A plugin is named by its section, a kernel by its operation.
    for name in re.findall(r"(?:plugin|called) '([^']+)'", text):
        for key in (name, f"kernels.{name}"):
            if _has(key, config):
                return [Problem(key, text)]
    return [Problem("", text)]


def _each_of(entries: Iterable[str], key: str) -> list[Problem]:
    """What is wrong with each entry of ``plugins.require`` or ``plugins.load``, not only with the
    first.
    """
    problems = []
    for index, entry in enumerate(entries):
        try:
            Plugins(plugin_settings(ConfigSource({"plugins": {key: [entry]}}, "config")))
        except PluginError as error:
            message = str(error).removeprefix("plugins.require: ")
            problems.append(Problem(f"plugins.{key}[{index}]", message))
    return problems


def _disabled_in_vain(plugins: Any) -> list[Problem]:
    """Entries of ``plugins.disable`` that nothing installed has. Alone they are notes, since another
    host may have it.
    """
    names = plugins.get("disable", ()) if isinstance(plugins, dict) else ()
    known = {name for r in Plugins().reports() for name in (r.found.name, r.found.dist)}
    return [
        Problem(f"plugins.disable[{i}]", f"nothing installed is called {name!r}")
        for i, name in enumerate(names)
        if name not in known
    ]


def _meant(problems: Iterable[Problem]) -> set[str]:
    """The keys that misspelt ones stand for."""
    return {name for p in problems for name in re.findall(r"did you mean '([\w.]+)'", p.fix)}


# -- what is left without them ---------------------------------------------------------------------


def _remove(path: str, data: dict[str, Any]) -> str:
    """Take the key out of `data`, or what is there of it; its path, "" where nothing is."""
    found = ""
    holder: dict[str, Any] = data
    at: Any = data
    for name in path.split("."):
        if not isinstance(at, dict) or name not in at:
            break
        holder, at = at, at[name]
        found = join(found, name)
    if found:
        del holder[found.rpartition(".")[2]]
    return found


def _has(path: str, data: Any) -> bool:
    for name in path.split("."):
        if not isinstance(data, dict) or name not in data:
            return False
        data = data[name]
    return True


def _follows(problem: Problem, gone: Collection[str], rest: Mapping[str, Any]) -> bool:
    """Whether a problem may be there only because keys are gone: it is about one, or names one."""
    own = problem.path.partition("[")[0].split(".")
    for path in gone:
        keys = path.split(".")
        if all(one == other for one, other in zip(keys, own, strict=False)):
            return True
        # What a module that cannot be loaded would have offered is not known.
        unknown = "did you mean" not in str(problem) and (
            " is called " in problem.message or problem.fix.startswith("no key of ")
        )
        if path in ("plugins", "plugins.load") and unknown:
            return True
        if keys[0] == own[0] or keys[0] not in rest:
            name = keys[-1] if keys[0] == own[0] else keys[0]
            if re.search(rf"\b{re.escape(name)}\b", problem.message):
                return True
    return False


# -- the order of the file -------------------------------------------------------------------------


def _in_order(problems: list[Problem], config: Mapping[str, Any]) -> list[Problem]:
    """By the place of their keys in the file; those of keys that are not there come last."""
    places: dict[str, int] = {}
    _number(config, "", places)
    last = len(places)

    def place(problem: Problem) -> int:
        path = problem.path.partition(", ")[0]
        while path and path not in places:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return places.get(path, last)

    return sorted(problems, key=place)


def _number(value: Any, path: str, places: dict[str, int]) -> None:
    places.setdefault(path, len(places))
    if isinstance(value, Mapping):
        for key, item in value.items():
            _number(item, join(path, key), places)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _number(item, join(path, index), places)
