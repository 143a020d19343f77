"""Keys that no model has: misspelt, in the wrong place, or of a section whose plugin is not
loaded."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_core.catalogue import documented, missing
from ds_core.config.core import CORE_KEYS, CoreConfig
from ds_core.config.keys import iter_keys
from ds_core.config.redaction import show_unknown
from ds_core.errors import Problem, join, nearest
from ds_core.naming import CORE

if TYPE_CHECKING:
    from ds_core.config.build import Models


def without_model(
    name: str, value: Any, models: Models, installed: Collection[str], disabled: Mapping[str, str]
) -> list[Problem]:
    """What is wrong with a top-level key that is neither the core's nor a loaded section.

    A documented section whose plugin is not installed is accepted while it is off; a misspelt key
    in it is an error all the same.
    """
    if name in disabled:
        why = f"the plugin that owns this section is disabled: {disabled[name]}"
        return [Problem(name, why, "enable it, or remove the section")]
    if name not in documented():
        return [_unknown_section(name, value, models, installed)]
    row = documented()[name]
    if _is_off(row, value):
        return (
            [*_misspelt(value, row["keys"], name, row["owner"] or "not offered")] if value else []
        )
    off = "remove it, or switch it off"
    if why := row.get("why", ""):
        return [Problem(name, f"this key is documented but not offered: {why}", off)]
    return [missing("sections", name, path=name, instead=off)]


def unknown_key(
    section: str, key: str, value: Any, names: Iterable[str], owner: str, belongs: str | None
) -> Problem:
    """The problem of a key that `section` does not have.

    names: the keys that it has.
    owner: of the section.
    belongs: the place where this key is known: a path, or words.
    """
    names = sorted(names)
    where = join(section, key)
    close = nearest(key, names)
    of_owner = f" ({owner})" if owner else ""
    message = f"unknown key {key!r} (its value is {show_unknown(key, value, close)})"
    if belongs not in (None, where):
        fix = f"{key!r} belongs {'at the top level' if belongs == key else f'in {belongs}'}"
    elif close:
        fix = f"did you mean {join(section, close)!r}{of_owner}?"
    elif names:
        listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        fix = f"{section}{of_owner} takes {listed}"
    else:
        everything = f"no key of {CORE}, of an installed plugin or of DeepSpeed is like it"
        fix = "it takes no keys" if section else everything
    return Problem(where, message, fix)


def places(models: Models) -> dict[str, str]:
    """Key -> the one place where a key of this name is known."""
    found: dict[str, set[str]] = {}
    for prefix, model in (
        ("", CoreConfig),
        *((name, model) for name, (model, _) in models.items()),
    ):
        for key in iter_keys(model, prefix):
            if "*" not in key.path and "[]" not in key.path:
                found.setdefault(key.spelling, set()).add(key.path)
    for name in (*documented(), *models):
        found.setdefault(name, set()).add(name)
    synonyms: dict[str, str] = json.loads(Path(__file__).with_name("synonyms.json").read_text())
    return synonyms | {name: paths.pop() for name, paths in found.items() if len(paths) == 1}


def _unknown_section(name: str, value: Any, models: Models, installed: Collection[str]) -> Problem:
    names = {*CORE_KEYS, *models, *installed, *documented()}
    close = nearest(name, names)
    owner = _owner_of(close, models, installed) if close else ""
    return unknown_key("", name, value, names if close else (), owner, places(models).get(name))


def _owner_of(section: str, models: Models, installed: Collection[str]) -> str:
    if section in CORE_KEYS:
        return CORE
    if section in models:
        return models[section][1]
    owner: str = documented().get(section, {}).get("owner", "an installed plugin")
    if section in installed:
        return owner
    return f"{owner}, not installed" if owner else "not offered"


def _is_off(row: Mapping[str, Any], value: Any) -> bool:
    """Whether a documented section says that it asks for nothing.

    Off: null, false, ``{}``, a switch that is false or 0, or nothing but false and null. A switch
    that is *absent* does not count: a misspelt one (``"stgae": 3``) must not train with stage 0 in
    silence.
    """
    if value is None or value is False or value in ({}, []):
        return True
    fields = value if isinstance(value, dict) and row["keys"] is not None else None
    switch = value if fields is None else fields.get(row.get("switch", "enabled"))
    if fields is None or switch is not None:
        return any(type(switch) is type(off) and switch == off for off in row.get("off", [False]))
    return all(v is None or v is False for v in fields.values())


def _misspelt(
    value: Any, keys: Mapping[str, Any] | None, path: str, owner: str
) -> Iterator[Problem]:
    """A problem for each key below `value`, a documented section's, that the documents do not
    have."""
    if keys is None:
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _misspelt(item, keys, join(path, index), owner)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in keys or "*" in keys:
                yield from _misspelt(item, keys.get(key, keys.get("*")), join(path, key), owner)
            else:
                yield unknown_key(path, key, item, keys, owner, None)
