"""Hooks in the form of an earlier contract, which plugins may still have (torch-free).

`adapted` gives in place of such a module one with the hooks of today, and warns its author. What is here goes two minor
releases after it was replaced (docs/stability.md).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_core.context import Context

__all__ = ["adapted"]


Hooks = dict[str, Callable[..., Any]]


def adapted(module: ModuleType) -> ModuleType | SimpleNamespace:
    """The module itself, or its hooks in today's form."""
    hooks: Hooks = {}
    for name, value in vars(module).items():
        if name.startswith("ds_") and inspect.isroutine(value):
            hooks[name] = value
    changed = False
    for is_old, instead, adapt in FORMS:
        if is_old(hooks):
            text = f"{module.__name__}: {instead}"
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            adapt(hooks)
            changed = True
    return SimpleNamespace(__name__=module.__name__, **hooks) if changed else module


def _methods_ask(hooks: Hooks) -> bool:
    return "ds_engine_methods" in hooks and bool(inspect.signature(hooks["ds_engine_methods"]).parameters)


def _give_methods_at_open(hooks: Hooks) -> None:
    """Methods that depend on the run are given when the engine is there."""
    given = hooks.pop("ds_engine_methods")
    opened = hooks.get("ds_open")

    def ds_open(ctx: Context) -> None:
        from ds_core.discovery import BACKENDS, Answer, Found

        giver = Found(given.__module__, BACKENDS, given.__module__, given.__module__, "")
        engine: Any = ctx.engine
        engine.add_methods({name: Answer(giver, function) for name, function in given(ctx).items()})
        if opened is not None:
            _call(opened, ctx=ctx)

    hooks["ds_open"] = ds_open


def _close_with_error(hooks: Hooks) -> None:
    failed = hooks.pop("ds_exception")
    closed = hooks.get("ds_close")

    def ds_close(ctx: Context, error: BaseException | None) -> None:
        if error is not None:
            _call(failed, ctx=ctx, error=error)
        if closed is not None:
            _call(closed, ctx=ctx, error=error)

    hooks["ds_close"] = ds_close


def _call(hook: Callable[..., Any], **arguments: Any) -> Any:
    """Call a hook with those of `arguments` that it takes."""
    taken = inspect.signature(hook).parameters
    return hook(**{name: value for name, value in arguments.items() if name in taken})


FORMS: tuple[tuple[Callable[[Hooks], bool], str, Callable[[Hooks], None]], ...] = (
    (
        _methods_ask,
        "ds_engine_methods takes no arguments any more and gives references; what acts on the engine is ds_open(ctx)",
        _give_methods_at_open,
    ),
    (
        lambda hooks: "ds_exception" in hooks,
        "ds_exception is ds_close(ctx, error) now, whose error is None where all went well",
        _close_with_error,
    ),
)
"""How an old form is known, what to write instead, and how it is brought into today's form."""
