"""Text -> data: JSON here, other formats by the hook `ds_config_formats` (torch-free).

A parser raises `Unreadable` with line and column. Repeated keys survive as `Pairs.repeated`, because only the caller
knows the path that leads to them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from ds_core.catalogue import install, offered_by

__all__ = ["Pairs", "Unreadable", "format_parser", "parse_json", "to_pairs"]


class Unreadable(Exception):
    """The text is not of its format. path: the key that is at fault, when it is known."""

    def __init__(self, message: str, path: str = "", line: int = 0, column: int = 0) -> None:
        where = f"line {line}, column {column}: " if line else ""
        self.message, self.path = f"{where}{message}", path
        super().__init__(self.message)


class Pairs(dict[str, Any]):
    """A dict that remembers which keys came more than once."""

    repeated: tuple[str, ...] = ()


def to_pairs(items: list[tuple[str, Any]]) -> Pairs:
    """A dict of `items`, which remembers the keys that come more than once."""
    found = Pairs(items)
    if len(found) < len(items):
        names = [k for k, _ in items]
        found.repeated = tuple(dict.fromkeys(k for k in names if names.count(k) > 1))
    return found


def parse_json(text: str) -> Any:
    """JSON, with NaN and Infinity let through for the caller to name."""
    try:
        return json.loads(text, object_pairs_hook=to_pairs)
    except json.JSONDecodeError as error:
        raise Unreadable(f"not JSON: {error.msg[:1].lower()}{error.msg[1:]}", "", error.lineno, error.colno) from None
    except RecursionError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise Unreadable(f"not JSON: {error}") from None


def format_parser(suffix: str) -> Callable[[str], Any] | None:
    """The parser that an installed plugin offers for files that end in `suffix`; None when none does.

    Raises Unreadable where a package of this repository would.
    """
    from ds_core.plugins import Plugins

    offers = Plugins().named("ds_config_formats", "config_formats")
    if suffix in offers:
        answer = offers[suffix]
        parser: Callable[[str], Any] = answer.resolve(answer.value, f"config files that end in {suffix}")
        return parser
    if (dist := offered_by("config_formats", suffix)) is not None:
        raise Unreadable(f"{suffix} files are read by {dist}, which is not installed; {install(dist)}")
    return None
