"""Shapes in signatures, ``x: Float[Tensor, "tokens hidden"]``, checked while tests run.

Packages import the names of jaxtyping under TYPE_CHECKING only, so in production nothing is imported
and nothing is called. In tests `install` wraps the functions whose annotations have shapes, as their
modules are loaded.

[Note: why not jaxtyping's own import hook] It checks every annotation of every function, so each
name that is only imported under TYPE_CHECKING would fail. Here only annotations with a shape are
evaluated, and a name in them that the module lacks (`Float`, a type of the package) is looked up in
jaxtyping and typing, else it stands for anything. It would also compile each module anew.
"""

from __future__ import annotations

import builtins
import collections.abc
import functools
import importlib.util
import inspect
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import FunctionType, ModuleType
from typing import Any

ENV = "DS_SHAPES"
"""The variable by which the workers of `ds_testing.pool` learn the packages, joined by spaces."""
MODULES = ("jaxtyping", "beartype")
_SHAPE = re.compile(r"\[\w+, ['\"]")  # Float[Tensor, "tokens hidden"]


def available() -> bool:
    """Whether jaxtyping and beartype are installed."""
    return all(importlib.util.find_spec(name) is not None for name in MODULES)


def install(packages: Iterable[str]) -> None:
    """Check shapes in the modules of `packages` that are imported from now on."""
    names = frozenset(packages)
    if names and available():
        sys.meta_path.insert(0, _Finder(names))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with checked shapes: its calls raise jaxtyping.TypeCheckError for a wrong one.

    A function without shapes in its annotations is returned as it is.
    """
    hints = {
        name: hint
        for name, hint in getattr(function, "__annotations__", {}).items()
        if isinstance(hint, str) and _SHAPE.search(hint)
    }
    if not hints:
        return function

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        # torch.compile reads the function itself: a check in its graph would be a graph break
        if sys.modules["torch"].compiler.is_compiling():
            return function(*args, **kwargs)
        return checker()(*args, **kwargs)

    # Made at the first call: most functions of a package are never called in one run.
    checker = functools.cache(lambda: _checker(function, hints))
    return checked


def _checker(function: Callable[..., Any], hints: dict[str, str]) -> Callable[..., Any]:
    import beartype
    import jaxtyping

    def bare(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    def evaluated(name: str) -> Any:
        # an annotation is an expression of the package's own source
        return eval(hints[name], {}, names) if name in hints else inspect.Signature.empty  # noqa: S307

    names = _Names(inspect.unwrap(function).__globals__)
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=evaluated(p.name)) for p in signature.parameters.values()]
    functools.update_wrapper(bare, function)
    bare.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=evaluated("return")
    )
    checked: Callable[..., Any] = jaxtyping.jaxtyped(bare, typechecker=beartype.beartype)
    return checked


class _Names(dict[str, Any]):
    """The names of a module, and those it imports under TYPE_CHECKING only."""

    def __missing__(self, name: str) -> Any:
        places = (builtins, sys.modules["jaxtyping"], collections.abc, typing, sys.modules["torch"])
        return next((getattr(m, name) for m in places if hasattr(m, name)), Any)


class _Finder(MetaPathFinder):
    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.packages:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        # Before anyone can import a name from it, so that callers everywhere get the checked one.
        for owner in _owners(module):
            for name, value in list(vars(owner).items()):
                checked = _check_member(value, module)
                if checked is not value:
                    setattr(owner, name, checked)


def _owners(module: ModuleType) -> Iterator[Any]:
    yield module
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            yield value


def _check_member(value: Any, module: ModuleType) -> Any:
    if isinstance(value, staticmethod | classmethod):
        inner = _check_member(value.__func__, module)
        return value if inner is value.__func__ else type(value)(inner)
    # a dataclass's __init__ is made by dataclasses, in the globals of its module
    ours = isinstance(value, FunctionType) and value.__globals__ is vars(module)
    # a decorated function: functools.wraps copies the module and the annotations
    ours = ours or (hasattr(value, "__wrapped__") and value.__module__ == module.__name__)
    return check(value) if ours and not isinstance(value, type) else value
