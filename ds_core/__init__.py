"""Distributed training whose every feature is a pip package.

``import ds_core`` loads no torch (PEP 562).
"""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ds_core.moved import install, names_of

__version__ = "0.1.0"
contract = 2
"""What plugins are written against, by number (docs/stability.md). A declaration module says the
least that it needs: ``DS_CONTRACT = 2``."""
oldest_contract = 1
"""The oldest contract whose plugins still work."""

install()


def names_on_first_use(
    package: str, homes: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], Iterable[str]]]:
    """The package's ``__getattr__`` and ``__dir__``.

    homes: module below the package -> its names that the package has, joined by spaces. Without it
        they are those that the package's ``__init__.pyi`` imports, which is read when the first
        name is asked for.
    """

    @functools.cache
    def home() -> Mapping[str, str]:
        if homes is None:
            return _imported_by_stub(package)
        return {
            name: f"{package}.{module}" for module, names in homes.items() for name in names.split()
        }

    def load(name: str) -> Any:
        if name == "__all__":  # what `import *` asks for
            return sorted(home())
        # The import system asks for these, and a package that has them sets them.
        if name.startswith("__") or name not in home():
            return names_of(package, 5)(name)
        value = getattr(importlib.import_module(home()[name]), name)
        # From now on it is found without this function.
        setattr(sys.modules[package], name, value)
        return value

    return load, home


def _imported_by_stub(package: str) -> dict[str, str]:
    """Name -> the module that the package's stub imports it from, or the package itself."""
    text = pkgutil.get_data(package, "__init__.pyi") or b""
    found = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            # "import X as X" hands X on; other imports are for the stub's own annotations.
            found.update({n.asname: statement.module for n in statement.names if n.asname})
        elif isinstance(statement, ast.AnnAssign):
            found[ast.unparse(statement.target)] = package
    return found


__getattr__, __dir__ = names_on_first_use(__name__)
