"""Every name that frozen plugins import from our packages is there, or answers with where it moved."""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent


def imported(source: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of each import from a package of ours, also inside of functions."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ds_"):
            yield from ((node.module or "", alias.name) for alias in node.names)


def test_the_names_that_frozen_plugins_import_are_there() -> None:
    folders = (HERE / "before_kits", HERE / "contract_1")
    wanted = {
        pair for folder in folders for file in folder.rglob("*.py") for pair in imported(file)
    }
    assert len(wanted) > 80
    missing = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for module, name in sorted(wanted):
            try:
                getattr(importlib.import_module(module), name)
            except (ImportError, AttributeError) as error:
                missing.append(f"{module}.{name}: {error}")
    assert missing == []
