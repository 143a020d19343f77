"""The documented keys of every section, for sections whose plugin is not here: read when such a section occurs.

``documented.json`` holds, per section, key -> null, or the keys below it; ``*`` stands for any name, and the items of
a list have the keys of their list. A section that is switched off is accepted without its plugin; a misspelt key in it
is an error all the same.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from ds_core.config.paths import join
from ds_core.config.translate import show_unknown
from ds_core.errors import Problem, nearest

__all__ = ["documented_keys", "misspelt_keys"]


@functools.cache
def documented_keys() -> Mapping[str, Mapping[str, Any]]:
    """Section -> its tree of keys."""
    found: dict[str, dict[str, Any]] = json.loads(files("ds_core.config").joinpath("documented.json").read_text())
    return found


def misspelt_keys(section: str, value: Any, owner: str) -> Iterator[Problem]:
    """A problem for each key in `value`, the data of `section`, that the documents do not have.

    owner: the distribution that serves the section, named with the nearest key.
    """
    yield from _walk(value, documented_keys().get(section, {"*": None}), section, owner)


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
