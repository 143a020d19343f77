"""Distributed training whose every feature is a pip package.

``import ds_core`` loads no torch (PEP 562).
"""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ds_core.moved import install

__version__ = "0.1.0"
contract = 2
"""What plugins are written against, by number (docs/stability.md). A declaration module says the
least that it needs: ``DS_CONTRACT = 2``."""
oldest_contract = 1
"""The oldest contract whose plugins still work."""

install()

if TYPE_CHECKING:
    from ds_core.accelerator import get_accelerator as get_accelerator
    from ds_core.accelerator import set_accelerator as set_accelerator
    from ds_core.assemble import initialize as initialize
    from ds_core.comm import init_distributed as init_distributed
    from ds_core.compose import compose as compose
    from ds_core.config import Section as Section
    from ds_core.data import DistributedLoader as DistributedLoader
    from ds_core.data import RepeatingLoader as RepeatingLoader
    from ds_core.engine import Engine as Engine
    from ds_core.hookspecs import hookimpl as hookimpl
    from ds_core.partition import Partitioner as Partitioner
    from ds_core.process import reset as reset
    from ds_core.replicated import Replicated as Replicated
    from ds_core.runner import Runner as Runner
    from ds_core.runner import Sequential as Sequential


def names_on_first_use(
    package: str, homes: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The package's ``__getattr__`` and ``__dir__``.

    homes: module below it -> its names that the package has. Without it they are those that the
        package's ``__init__.pyi`` imports, which is read when the first name is asked for.
    """

    @functools.cache
    def home() -> dict[str, str]:
        if homes is None:
            return _imported_by_stub(package)
        return {name: module for module, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name == "__all__":  # what `import *` asks for
            return sorted(home())
        # The import system asks for these, and a package that has them sets them.
        if name.startswith("__") or name not in home():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{home()[name]}")
        is_module = name == home()[name] and not hasattr(module, name)
        value = module if is_module else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *home()})


def _imported_by_stub(package: str) -> dict[str, str]:
    """Name -> the module below `package` that its stub imports it from."""
    text = pkgutil.get_data(package, "__init__.pyi") or b""
    found = {}
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            module = statement.module.removeprefix(f"{package}.")
            found.update({name.asname or name.name: module for name in statement.names})
    return found


__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "accelerator": "get_accelerator set_accelerator",
        "assemble": "initialize",
        "comm": "init_distributed",
        "compose": "compose",
        "config": "Section",
        "data": "DistributedLoader RepeatingLoader",
        "engine": "Engine",
        "hookspecs": "hookimpl hookspecs",
        "partition": "Partitioner",
        "process": "reset",
        "replicated": "Replicated",
        "runner": "Runner Sequential",
    },
)
