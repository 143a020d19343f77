"""The hooks that the keys share (torch-free).

Each key is a section with a declaration module of its own, so any subset of them may take part. Of those in the config
the first of `KEYS` acts for all; hooks of the others return at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ds_core.context import StashKey

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.telemetry import Monitor
    from ds_step_log.step_log import StepLog

__all__ = ["dump", "measuring", "printing"]

KEYS = ("wall_clock_breakdown", "memory_breakdown", "steps_per_print")
LOG: StashKey[StepLog] = StashKey("the step log")


def _acts(ctx: Context, key: str) -> bool:
    """Whether `key` is the first of those in the config."""
    return next(k for k in KEYS if k in ctx.config.sections) == key


def _log(ctx: Context) -> StepLog:
    """The run's step log; made at its first use."""
    from ds_step_log.step_log import StepLog

    if LOG not in ctx.stash:
        ctx.stash[LOG] = StepLog(ctx)
    return ctx.stash[LOG]


def printing(key: str) -> tuple[Callable[[Context], Iterable[Monitor]], Callable[..., None]]:
    """``ds_monitors``, which gives none but is called when the engine is built, and ``ds_step_end``."""

    def ds_monitors(ctx: Context) -> Iterable[Monitor]:
        if _acts(ctx, key) and _log(ctx).prints:
            from ds_core.process import show_log

            show_log()
        return ()

    def ds_step_end(ctx: Context, metrics: Mapping[str, float]) -> None:
        if _acts(ctx, key):
            _log(ctx).step_end(ctx.engine, metrics)

    return ds_monitors, ds_step_end


def measuring(key: str) -> tuple[Callable[..., None], Callable[..., None]]:
    """``ds_phase_begin`` and ``ds_phase_end``."""

    def ds_phase_begin(ctx: Context, phase: str) -> None:
        if _acts(ctx, key):
            _log(ctx).phase_begin(phase)

    def ds_phase_end(ctx: Context, phase: str) -> None:
        if _acts(ctx, key):
            _log(ctx).phase_end(phase)

    return ds_phase_begin, ds_phase_end


def dump(ctx: Context) -> None:
    """``dump_state``: log the run's whole configuration."""
    section: Any = ctx.config.section("dump_state")
    if section is not None and section.root:
        from ds_core.process import show_log
        from ds_step_log.step_log import log

        show_log()
        config, mesh, plugins = ctx.config, ctx.mesh, ctx.plugins
        parts = (config.redacted(), mesh.describe(), ctx.batch, ctx.precision, plugins.loaded_versions())
        log.info("config %s, mesh %s, batch %s, precision %s, plugins %s", *parts)
