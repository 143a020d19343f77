"""Documented sections whose plugin is not installed: whether they are off, and whether their keys are spelt right.

A section that is off is accepted without its plugin; a misspelt key in it is an error all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ds_core.catalogue import documented
from ds_core.config.translate import show_unknown
from ds_core.errors import Problem, join, nearest

__all__ = ["is_off", "misspelt_keys"]


def is_off(name: str, value: Any) -> bool:
    """Whether a documented section asks for nothing, in so many words.

    Off: null, false, ``{}``, a switch that is false or 0, or nothing but false and null. A switch that is
    *absent* does not count: a misspelt one (``"stgae": 3``) must not train with stage 0 in silence.
    """
    row = documented()[name]
    off = row.get("off", [False])
    if value is None or value is False or value in ({}, []):
        return True
    if not isinstance(value, dict) or row["keys"] is None:
        return any(type(value) is type(o) and value == o for o in off)
    if (switch := value.get(row.get("switch", "enabled"))) is not None:
        return any(type(switch) is type(o) and switch == o for o in off)
    return all(v is None or v is False for v in value.values())


def misspelt_keys(section: str, value: Any) -> Iterator[Problem]:
    """A problem for each key in `value`, the data of a documented section, that the documents do not have."""
    found = documented()[section]
    yield from _walk(value, found["keys"], section, found["owner"] or "not offered")


def _walk(value: Any, keys: Mapping[str, Any] | None, path: str, owner: str) -> Iterator[Problem]:
    if keys is None:
        return
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _walk(item, keys, join(path, index), owner)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key in keys or "*" in keys:
                yield from _walk(item, keys.get(key, keys.get("*")), join(path, key), owner)
            else:
                yield _misspelt(key, item, keys, path, owner)


def _misspelt(key: str, value: Any, keys: Mapping[str, Any], path: str, owner: str) -> Problem:
    close = nearest(key, keys)
    mend = f"did you mean {join(path, close)!r} ({owner})?" if close else f"{path} takes {', '.join(sorted(keys))}"
    return Problem(join(path, key), f"unknown key {key!r} (its value is {show_unknown(key, value, close)})", mend)
