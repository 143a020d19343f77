"""hjson, YAML and TOML -> data; each raises `Unreadable` with line and column, and keeps repeated
keys.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ds_core.config import Pairs, Unreadable, to_pairs
from ds_core.errors import join

YAML_LIMIT = 200_000  # values; an alias can represent any number of them
YAML_DEPTH = 100
TOML_DOTS = 500


def parse_hjson(text: str) -> Any:
    """JSON for people: comments, no quotes, no commas."""
    hjson = importlib.import_module("hjson")
    try:
        return hjson.loads(text, object_pairs_hook=to_pairs)
    except RecursionError:
        raise
    except Exception as error:  # the parser also raises IndexError and OverflowError on bad input
        line = getattr(error, "lineno", 0)
        column = getattr(error, "colno", 0)
        detail = (
            getattr(error, "msg", None)
            or f"the text breaks off or holds a bad number ({type(error).__name__})"
        )
        raise Unreadable(f"not hjson: {detail}", "", line, column) from None


def parse_toml(text: str) -> Any:
    """TOML; the error for a repeated key names its full path."""
    tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    # The parser is quadratic in the length of a dotted key: a minute for 50,000 levels.
    if any(part.count(".") > TOML_DOTS for part in re.split(r"[=,{}\[\]\n#]", text)):
        raise Unreadable(f"a key of more than {TOML_DOTS} levels")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise
    except ValueError as error:
        at = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line, column = (int(at[1]), int(at[2])) if at else (len(text.splitlines()), 1)
        detail = re.sub(r"\s*\(at [^)]*\)$", "", str(error))
        if detail.startswith(("Cannot overwrite", "Cannot declare", "Cannot mutate")):
            path = _toml_path(text, line, column)
            raise Unreadable(
                f"the key {path.rpartition('.')[2]!r} is repeated", path, line, column
            ) from None
        raise Unreadable(f"not TOML: {detail[:1].lower()}{detail[1:]}", "", line, column) from None


def _toml_path(text: str, line: int, column: int) -> str:
    """The dotted path of the key on a line of TOML, from the nearest table header above it."""
    lines = text.splitlines()
    if column <= 1 and line > 1:  # the parser had already passed the end of the line
        line -= 1
    here = lines[line - 1].strip()
    if here.startswith("["):
        return here.strip("[] ")
    headers = [
        h.strip().split("#")[0].strip("[] ") for h in lines[: line - 1] if h.strip().startswith("[")
    ]
    key = here.split("=")[0].strip().replace('"', "").replace("'", "")
    return join(headers[-1] if headers else "", key)


# -- YAML ------------------------------------------------------------------------------------------


def parse_yaml(text: str) -> Any:
    """YAML, safely: plain data only, ``5e8`` is a number, aliases and merge keys are followed
    within limits.
    """
    yaml = importlib.import_module("yaml")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return _Yaml(loader.construct_object).build(node, "", 0) if node is not None else None
    except (RecursionError, Unreadable):
        raise
    except Exception as error:  # YAMLError, and what its constructors let through
        mark = getattr(error, "problem_mark", None)
        detail = (
            getattr(error, "problem", None)
            or getattr(error, "reason", None)
            or str(error).splitlines()[0]
        )
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        raise Unreadable(f"not YAML: {detail}", "", line, column) from None


_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")


class _Yaml:
    """Builds data from the node graph of PyYAML's safe loader, so that repeated keys and paths are
    seen.
    """

    def __init__(self, scalar: Callable[[Any], Any]) -> None:
        self.scalar = scalar
        self.count = 0

    def build(self, node: Any, path: str, depth: int) -> Any:
        self.count += 1
        if depth > YAML_DEPTH or self.count > YAML_LIMIT:
            raise Unreadable(
                f"more than {YAML_DEPTH} levels or {YAML_LIMIT} values, aliases followed", path[:60]
            )
        if node.id == "mapping" and node.tag == f"{_TAG}map":
            return self._mapping(node, path, depth)
        if node.id == "sequence" and node.tag == f"{_TAG}seq":
            return [self.build(n, join(path, i), depth + 1) for i, n in enumerate(node.value)]
        if node.id == "scalar":
            return self._scalar(node, path)
        raise self._refuse(node, path)

    def _mapping(self, node: Any, path: str, depth: int) -> Pairs:
        items: list[tuple[Any, Any]] = []
        merged: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_TAG}merge":
                bases = self.build(value_node, path, depth + 1)
                for base in bases if isinstance(bases, list) else [bases]:
                    if not isinstance(base, Mapping):
                        raise Unreadable("<< must name a mapping", path, *_mark(value_node))
                    merged = {**base, **merged}
                continue
            if key_node.id != "scalar":
                raise Unreadable("a key must be text", path, *_mark(key_node))
            key = key_node.value if key_node.tag == f"{_TAG}str" else self._scalar(key_node, path)
            where = join(path, key if isinstance(key, str) else repr(key))
            items.append((key, self.build(value_node, where, depth + 1)))
        found = to_pairs(items)
        for key, value in merged.items():
            found.setdefault(key, value)
        return found

    def _scalar(self, node: Any, path: str) -> Any:
        kind = node.tag.removeprefix(_TAG)
        if kind == "str":
            plain = node.style is None and _FLOAT.fullmatch(node.value)
            return float(node.value) if plain else node.value
        if kind == "timestamp" or (kind in ("int", "float") and ":" in node.value):
            # a date, or 1:30, which YAML 1.1 reads as base 60: text to everybody else
            return node.value
        if kind in ("int", "float", "bool", "null"):
            return self.scalar(node)
        raise self._refuse(node, path)

    def _refuse(self, node: Any, path: str) -> Unreadable:
        return Unreadable(
            f"the tag {node.tag!r} is not allowed; plain values only", path, *_mark(node)
        )


def _mark(node: Any) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1
