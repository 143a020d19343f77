"""Packages whose names load on first use (PEP 562), so that importing one brings in no torch."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["names_on_first_use"]


def names_on_first_use(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The package's ``__getattr__`` and ``__dir__``. homes: module below it -> its names that the package has."""
    home = {name: module for module, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name == "__all__":  # what `import *` asks for
            return sorted(home)
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{home[name]}")
        value = module if name == home[name] and not hasattr(module, name) else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *home})
