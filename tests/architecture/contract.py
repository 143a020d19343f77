"""Records what plugins import from ds_core, with its arguments: ``python
tests/architecture/contract.py``.

Names are added; one that has gone stays in the file, where a test asks for its entry in
`ds_core.moved`.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from graph import parse  # noqa: E402

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("contract.json")
Arguments = list[list[Any]]


@functools.cache
def imported(root: Path) -> set[str]:
    """``module:name`` of everything that packages beside the core import from it."""
    found = set()
    for file in sorted(root.glob("*/*/ds_*/**/*.py")):
        for node in ast.walk(parse(file.read_text())):
            if (
                isinstance(node, ast.ImportFrom)
                and (node.module or "").partition(".")[0] == "ds_core"
            ):
                found |= {
                    f"{node.module}:{alias.name}"
                    for alias in node.names
                    if not alias.name.startswith("_")
                }
    return found


def arguments(function: Any) -> Arguments | None:
    """Name, kind and whether it may be left out, of each argument; None for what has no
    signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    return [[p.name, p.kind.name, p.default is not p.empty] for p in parameters]


def described(value: Any) -> dict[str, Any]:
    """What is recorded of a name: its arguments, and for a class of the core those of its public
    methods.
    """
    said: dict[str, Any] = {"arguments": arguments(value) if callable(value) else None}
    if inspect.isclass(value) and value.__module__.partition(".")[0] == "ds_core":
        methods = {n: m for n, m in inspect.getmembers(value, callable) if not n.startswith("_")}
        said["methods"] = {n: arguments(m) for n, m in sorted(methods.items()) if _own(m)}
    return said


def _own(method: Any) -> bool:
    return str(getattr(method, "__module__", "")).partition(".")[0] == "ds_core"


def resolved(name: str) -> Any:
    """The object of ``module:name``, which may be a module."""
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    if not hasattr(found, attribute):
        return importlib.import_module(f"{module}.{attribute}")
    return getattr(found, attribute)


def changes(name: str, before: dict[str, Any], value: Any) -> Iterator[str]:
    """What callers of `name`, as it was `before`, would notice."""
    now = described(value)
    yield from differences(name, before["arguments"], now["arguments"])
    for method, taken in before.get("methods", {}).items():
        if not hasattr(value, method):
            yield f"{name}.{method} is gone"
        else:
            yield from differences(f"{name}.{method}", taken, arguments(getattr(value, method)))


def differences(name: str, before: Arguments | None, now: Arguments | None) -> Iterator[str]:
    """Arguments that callers gave and that are not taken any more, and new ones that must be
    given."""
    if before is None or now is None:
        return
    open_ended = any(kind == "VAR_KEYWORD" for _, kind, _ in now)
    taken = {argument for argument, _, _ in now}
    for argument, kind, _ in before:
        if argument not in taken and not kind.startswith("VAR_") and not open_ended:
            yield f"{name} does not take {argument!r} any more"
    known = {argument for argument, _, _ in before}
    for argument, kind, optional in now:
        if argument not in known and not optional and not kind.startswith("VAR_"):
            yield f"{name} must be given {argument!r}"


def main(root: Path, *, anew: bool) -> None:
    """Write the file: of `root`, whose packages can be imported."""
    recorded = {} if anew else json.loads(FILE.read_text())
    for name in sorted(imported(root)):
        if name not in recorded:
            recorded[name] = described(resolved(name))
    text = json.dumps(dict(sorted(recorded.items())), separators=(",", ":"))
    FILE.write_text(text.replace('},"ds_', '},\n"ds_') + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT, anew=len(sys.argv) > 1)
