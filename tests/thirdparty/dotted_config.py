"""A config format of somebody else: files that end in ``.dotted`` have lines of the form
``fp16.enabled = true``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ds_core.config import Unreadable, to_pairs


class Items(list[tuple[str, Any]]):
    """The keys of one object, in order; a key that is repeated stands here twice, so that the core
    can report it.
    """

    def inside(self, key: str) -> Items:
        """The object under `key`, which is made where there is none."""
        found = next(
            (value for name, value in self if name == key and isinstance(value, Items)), None
        )
        if found is None:
            found = Items()
            self.append((key, found))
        return found

    def data(self) -> dict[str, Any]:
        """As plain data."""
        return to_pairs(
            [(key, value.data() if isinstance(value, Items) else value) for key, value in self]
        )


def ds_config_formats() -> Mapping[str, str]:
    """Suffix -> parser."""
    return {".dotted": "dotted_config:parse"}


def parse(text: str) -> dict[str, Any]:
    """The config; values are JSON, ``#`` begins a comment line."""
    root = Items()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        path, equals, value = line.partition("=")
        *parents, key = (part.strip() for part in path.split("."))
        if not equals or not all((*parents, key)):
            raise Unreadable("a line must read `dotted.key = value`", "", number, 1)
        place = root
        for parent in parents:
            place = place.inside(parent)
        try:
            place.append((key, json.loads(value, object_pairs_hook=to_pairs)))
        except json.JSONDecodeError as error:
            raise Unreadable(
                f"not JSON: {error.msg}", path.strip(), number, len(path) + 2 + error.pos
            ) from None
    return root.data()
