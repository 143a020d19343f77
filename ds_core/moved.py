"""Names that have moved, under their old ones: modules and attributes of earlier layouts, of the core
and of our packages that others import (torch-free).

An old name gives what the new one has, with a DeprecationWarning that says the new one. ``dscore
plugins upgrade`` rewrites sources by the same tables. What is here goes two minor releases after it
moved (docs/stability.md).
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ds_core.naming import CORE, dist_of

_TABLES = json.loads(pkgutil.get_data("ds_core", "moved.json") or b"{}")

MODULES: Mapping[str, str] = _TABLES["modules"]
"""Old module -> where its names are now. What lies below an old module lies below the new one."""

NAMES: Mapping[str, Mapping[str, str]] = _TABLES["names"]
"""Module -> its names that are elsewhere now: old name -> ``module:name``, or ``module:name()`` for
what it gives.
"""

HOOKS_BEFORE = frozenset(_TABLES["hooks"])
"""Hooks that had another form or name, see `ds_core.plugins.old_forms`."""

METHODS: Mapping[str, Mapping[str, str]] = _TABLES["methods"]
"""Class of a contract -> its methods that have another name now."""


def now(module: str) -> str | None:
    """Where the module `module` of an earlier layout is now; None for one that has not moved."""
    head = module
    rest = ""
    while head:
        if head in MODULES:
            found = MODULES[head] + rest
            return now(found) or found  # it may have moved again
        head, dot, last = head.rpartition(".")
        rest = f"{dot}{last}{rest}"
    return None


def check_contract(plugin: object, needs: Any) -> None:
    """Raises PluginError for a plugin that needs another contract than this core keeps."""
    from ds_core import __version__, contract, oldest_contract
    from ds_core.errors import PluginError

    if type(needs) is not int:
        raise PluginError(
            f"plugin {plugin} has DS_CONTRACT = {needs!r}; it is a whole number, such as {contract}"
        )
    if not oldest_contract <= needs <= contract:
        fix = f"upgrade {CORE}" if needs > contract else f"upgrade it, or install an older {CORE}"
        raise PluginError(
            f"plugin {plugin} needs contract {needs}, and {CORE} {__version__} keeps "
            f"{oldest_contract} to {contract}: {fix}"
        )


def names_of(module: str, stacklevel: int = 4) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module of the core from which names have moved."""

    def find(name: str) -> Any:
        target = NAMES.get(module, {}).get(name)
        if target is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return _from(f"{module}.{name}", target, stacklevel)

    return find


def _from(old: str, target: str, stacklevel: int = 4) -> Any:
    home, _, name = target.partition(":")
    _warn(old, f"{home}.{name}", stacklevel)
    found = getattr(_import(old, home), name.removesuffix("()"))
    return found() if name.endswith("()") else found


def _warn(old: str, new: str, stacklevel: int) -> None:
    text = f"{old} is {new} now; `dscore plugins upgrade PATH` rewrites a plugin's sources"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)


def _import(old: str, new: str) -> ModuleType:
    try:
        return importlib.import_module(new)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != new.partition(".")[0]:
            raise
        from ds_core.catalogue import install

        dist = dist_of(new.partition(".")[0])
        text = f"{old} is {new} now, of {dist}, which is not installed: {install(dist)}"
        raise ModuleNotFoundError(text, name=old) from error


class _Finder:
    """Finds modules of earlier layouts, for ``import``."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        """A spec for a module that has moved."""
        if not name.startswith("ds_") or (new := now(name)) is None:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, _Loader(new))  # type: ignore[arg-type]  # it has what import asks for


class _Loader:
    """Makes a module of an earlier layout: one that gives the names of the new one."""

    def __init__(self, new: str) -> None:
        self.new = new

    def create_module(self, spec: Any) -> ModuleType:
        """An own object, so that the new module keeps its name; a package, for what lies below
        it."""
        made = ModuleType(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Take over what the new module has."""
        old = module.__name__
        _warn(old, self.new, stacklevel=3)
        home = _import(old, self.new)
        renamed = NAMES.get(old, {})

        def find(name: str) -> Any:
            if name in renamed and name not in vars(home):
                return _from(f"{old}.{name}", renamed[name])
            return getattr(home, name)

        for name, value in vars(home).items():
            if not (name.startswith("__") and name.endswith("__")):
                module.__dict__[name] = value
        module.__dict__.update(__getattr__=find, __dir__=lambda: dir(home), __doc__=home.__doc__)
        if hasattr(home, "__all__"):
            module.__dict__["__all__"] = [*home.__all__]


def install() -> None:
    """Let imports find modules of earlier layouts; before other finders, which would look below the
    new ones.
    """
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
