"""Hooks and partitioners in the form of an earlier contract, which plugins may still have
(torch-free).

`adapted` replaces such a module by one with the current hooks, `give_plans` lets such a
partitioner find what it reads; both warn the author. What is here goes two minor releases after it
was replaced (docs/stability.md).
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.gradients import BackwardPlan
    from ds_core.partition import Partitioner

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
    return "ds_engine_methods" in hooks and bool(
        inspect.signature(hooks["ds_engine_methods"]).parameters
    )


def _give_methods_at_open(hooks: Hooks) -> None:
    """Methods that depend on the run are given when the engine is there."""
    given = hooks.pop("ds_engine_methods")
    opened = hooks.get("ds_open")

    def ds_open(ctx: Context) -> None:
        from ds_core.plugins.calls import Answer
        from ds_core.plugins.discovery import BACKENDS, Found

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


def _hear_of_evaluations(hooks: Hooks) -> None:
    """Evaluations are the phase "eval"; who asked for nothing else hears of no other phase."""
    begun = hooks.pop("ds_eval_begin", None)
    ended = hooks.pop("ds_eval_end", None)
    begin = hooks.get("ds_phase_begin")
    end = hooks.get("ds_phase_end")
    listens = hooks.get("ds_listens")

    def ds_phase_begin(ctx: Context, phase: str, inputs: Any) -> None:
        if (hook := begun if phase == "eval" else begin) is not None:
            _call(hook, ctx=ctx, phase=phase, inputs=inputs)

    def ds_phase_end(ctx: Context, phase: str, metrics: Any) -> None:
        if (hook := ended if phase == "eval" else end) is not None:
            _call(hook, ctx=ctx, phase=phase, metrics=metrics)

    def ds_listens(ctx: Context) -> Any:
        own = {
            name: 0
            for name, hook in (("ds_phase_begin", begin), ("ds_phase_end", end))
            if hook is None
        }
        return (_call(listens, ctx=ctx) if listens is not None else {}) | own

    hooks |= {
        "ds_phase_begin": ds_phase_begin,
        "ds_phase_end": ds_phase_end,
        "ds_listens": ds_listens,
    }


FORMS: tuple[tuple[Callable[[Hooks], bool], str, Callable[[Hooks], None]], ...] = (
    (
        _methods_ask,
        "ds_engine_methods takes no arguments any more and gives references; what acts on the "
        "engine is ds_open(ctx)",
        _give_methods_at_open,
    ),
    (
        lambda hooks: "ds_exception" in hooks,
        "ds_exception is ds_close(ctx, error) now, whose error is None where all went well",
        _close_with_error,
    ),
    (
        lambda hooks: "ds_eval_begin" in hooks or "ds_eval_end" in hooks,
        'ds_eval_begin and ds_eval_end are the phase "eval" of ds_phase_begin and ds_phase_end now',
        _hear_of_evaluations,
    ),
)
"""How an old form is known, what to write instead, and how it is brought into today's form."""


# -- partitioners that were written before `BackwardPlan` ------------------------------------------

PLANS = (
    "{kind}.{old}: begin and finish take a BackwardPlan and attach takes updated=, instead of the "
    "attributes sync, hold, may_wait and updated that the core set (ds_core.partition.BackwardPlan)"
)


def give_plans(made: Partitioner) -> None:
    """Let `made`, if it is of the earlier contract, find the parts of each plan where it looks for
    them.

    Raises PluginError for a subclass of another partitioner, whose own methods want plans.
    """
    from ds_core.errors import PluginError

    kind: type[Partitioner] = type(made)
    old = [name for name in ("attach", "begin", "finish") if _is_old(name, getattr(kind, name))]
    if not old:
        return
    text = PLANS.format(kind=kind.__name__, old=old[0])
    if any(_wraps_another(kind, name) for name in old):
        raise PluginError(text)
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    told: Any = made  # has the attributes of the earlier contract
    told.sync = True
    told.hold = False
    told.may_wait = True
    told.updated = True
    for name in {*old, "begin"}:  # `begin` sets the attributes from the plan in any case
        setattr(told, name, _with_plan(told, name))


def _is_old(name: str, method: Callable[..., Any]) -> bool:
    taken = inspect.signature(method).parameters
    if name == "attach":
        return "updated" not in taken and not any(p.kind is p.VAR_KEYWORD for p in taken.values())
    return "changed" in taken if name == "begin" else len(taken) == 1


def _wraps_another(kind: type, name: str) -> bool:
    """Whether the method stands before that of another partitioner, which it probably calls."""
    having = [c for c in kind.__mro__ if name in vars(c)]
    return any(c.__module__ != "ds_core.partition.partitioner" for c in having[1:])


def _with_plan(told: Any, name: str) -> Callable[..., Any]:
    method = getattr(told, name)

    def attach(module: Any, groups: Any, *, updated: bool = True) -> Any:
        told.updated = updated
        return method(module, groups)

    def begin(plan: BackwardPlan) -> None:
        _tell(told, plan)
        method(plan.changed if _is_old("begin", type(told).begin) else plan)

    def finish(plan: BackwardPlan) -> None:
        _tell(told, plan)
        method()

    forms: dict[str, Callable[..., Any]] = {"attach": attach, "begin": begin, "finish": finish}
    return forms[name]


def _tell(told: Any, plan: BackwardPlan) -> None:
    told.sync = plan.reduce
    told.hold = plan.keep_local
    told.may_wait = plan.may_wait
