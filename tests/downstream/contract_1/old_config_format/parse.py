"""Sections of ``key = JSON``; keys before the first section are the config's own."""

from __future__ import annotations

import json
from typing import Any

from ds_core.config import Unreadable, to_pairs


def parse(text: str) -> Any:
    """Raises `Unreadable` with line and column. `to_pairs` makes objects, and remembers keys that come twice."""
    top: list[tuple[str, Any]] = []
    section: list[tuple[str, Any]] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith((";", "#")):
            continue
        if line.startswith("["):
            section = []
            top.append((line.strip("[]"), section))
            continue
        key, _, value = line.partition("=")
        try:
            (top if section is None else section).append((key.strip(), json.loads(value)))
        except json.JSONDecodeError as error:
            raise Unreadable(f"not JSON: {error.msg}", "", number, len(key) + 2) from None
    return to_pairs([(key, to_pairs(value) if type(value) is list else value) for key, value in top])
