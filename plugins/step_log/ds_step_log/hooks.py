"""The hooks that the keys share (torch-free).

Each key is a section with a declaration module of its own, so any subset of them may take part. Of those in the config
the first of `KEYS` acts for all; hooks of the others return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsFloat

from ds_core.context import StashKey

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_step_log.step_log import StepLog

__all__ = ["LOG", "Hooks", "dump", "hooks"]

KEYS = ("wall_clock_breakdown", "memory_breakdown", "steps_per_print", "timers", "memory_snapshot")
LOG: StashKey[StepLog] = StashKey("the step log")


class Hooks(NamedTuple):
    """The hooks of one key, in the order in which declaration modules name them."""

    ds_open: Callable[..., None]
    ds_listens: Callable[..., Mapping[str, int]]
    ds_phase_begin: Callable[..., None]
    ds_phase_end: Callable[..., None]
    ds_eval_begin: Callable[..., None]
    ds_eval_end: Callable[..., None]
    ds_metrics: Callable[..., Mapping[str, SupportsFloat]]
    ds_step_end: Callable[..., None]
    ds_checkpoint_loaded: Callable[..., None]


NEVER = dict.fromkeys(("ds_phase_begin", "ds_phase_end", "ds_metrics", "ds_step_end"), 0)
"""How a key listens for which another acts."""


def hooks(key: str) -> Hooks:
    """The hooks of `key`."""

    def acting(ctx: Context) -> StepLog | None:
        """The run's step log, if `key` is the first of those in the config."""
        return ctx.stash[LOG] if next(k for k in KEYS if k in ctx.config.sections) == key else None

    def ds_open(ctx: Context) -> None:
        if next(k for k in KEYS if k in ctx.config.sections) != key:
            return
        from ds_step_log.step_log import StepLog

        ctx.stash[LOG] = log = StepLog(ctx)
        if log.prints and ctx.rank == 0:
            from ds_core.process import show_log

            show_log()

    def ds_listens(ctx: Context) -> Mapping[str, int]:
        log = acting(ctx)
        return NEVER if log is None else log.listens()

    # What is called in a step is called for the key that acts alone: the others do not listen.

    def ds_phase_begin(ctx: Context, phase: str, inputs: Any) -> None:
        ctx.stash[LOG].phase_begin(phase, inputs)

    def ds_phase_end(ctx: Context, phase: str) -> None:
        ctx.stash[LOG].phase_end(phase)

    def ds_eval_begin(ctx: Context) -> None:
        if (log := acting(ctx)) is not None:
            log.eval_begin()

    def ds_eval_end(ctx: Context) -> None:
        if (log := acting(ctx)) is not None:
            log.eval_end()

    def ds_metrics(ctx: Context) -> Mapping[str, SupportsFloat]:
        return ctx.stash[LOG].metrics(ctx.engine)

    def ds_step_end(ctx: Context, metrics: Mapping[str, float]) -> None:
        ctx.stash[LOG].step_end(ctx.engine, metrics)

    def ds_checkpoint_loaded(ctx: Context) -> None:
        if (log := acting(ctx)) is not None:
            log.checkpoint_loaded(ctx.engine)

    return Hooks(
        ds_open,
        ds_listens,
        ds_phase_begin,
        ds_phase_end,
        ds_eval_begin,
        ds_eval_end,
        ds_metrics,
        ds_step_end,
        ds_checkpoint_loaded,
    )


def dump(ctx: Context) -> None:
    """``dump_state``: log the run's whole configuration."""
    from ds_step_log.config import DumpState

    section = ctx.config.section(DumpState)
    if section is not None and section.root:
        from ds_core.process import show_log
        from ds_step_log.step_log import log

        show_log()
        config, mesh, plugins = ctx.config, ctx.mesh, ctx.plugins
        parts = (config.redacted(), mesh.describe(), ctx.batch, ctx.precision, plugins.loaded_versions())
        log.info("config %s, mesh %s, batch %s, precision %s, plugins %s", *parts)
