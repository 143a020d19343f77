"""What dscore-step-log offers: six keys of the config, any of which starts the log of steps
(torch-free).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, SupportsFloat

from ds_core.context import StashKey

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.context import Context
    from ds_step_log.step_log import StepLog

LOG: StashKey[StepLog] = StashKey("the step log")


def ds_config() -> Mapping[str, type[BaseModel]]:
    """The models of the keys."""
    from ds_step_log import config

    return {
        "dump_state": config.DumpState,
        "memory_breakdown": config.MemoryBreakdown,
        "memory_snapshot": config.MemorySnapshot,
        "steps_per_print": config.StepsPerPrint,
        "timers": config.Timers,
        "wall_clock_breakdown": config.WallClockBreakdown,
    }


def ds_open(ctx: Context) -> None:
    """The log begins; rank 0 shows what it prints, and with ``dump_state`` the whole
    configuration."""
    from ds_step_log.config import DumpState
    from ds_step_log.step_log import StepLog, dump

    ctx.stash[LOG] = log = StepLog(ctx)
    section = ctx.config.section(DumpState)
    dumps = section is not None and section.root
    if ctx.rank == 0 and (log.prints or dumps):
        from ds_core.process import show_log

        show_log()
        if dumps:
            dump(ctx)


def ds_listens(ctx: Context) -> Mapping[str, int]:
    """In the steps that are measured or printed."""
    return ctx.stash[LOG].listens()


def ds_phase_begin(ctx: Context, phase: str, inputs: Any) -> None:
    """Times and memory of the phase."""
    ctx.stash[LOG].phase_begin(phase, inputs)


def ds_phase_end(ctx: Context, phase: str) -> None:
    """The phase is over."""
    ctx.stash[LOG].phase_end(phase)


def ds_step_begin(ctx: Context) -> None:
    """In the step that ``memory_snapshot`` names: look at what is held."""
    if (snapshot := ctx.stash[LOG].snapshot) is not None:
        snapshot.step_begin()


def ds_metrics(ctx: Context) -> Mapping[str, SupportsFloat]:
    """What was measured of the step."""
    return ctx.stash[LOG].metrics(ctx.engine)


def ds_step_end(ctx: Context, metrics: Mapping[str, float]) -> None:
    """A line, when it is due."""
    ctx.stash[LOG].step_end(ctx.engine, metrics)


def ds_checkpoint_loaded(ctx: Context) -> None:
    """The counters are the checkpoint's."""
    ctx.stash[LOG].checkpoint_loaded(ctx.engine)


def ds_close(ctx: Context, error: BaseException | None) -> None:
    """Out of memory: what was held is written. The allocator need remember nothing more."""
    snapshot = ctx.stash[LOG].snapshot
    if snapshot is None:
        return
    if error is not None:
        snapshot.failed(error)
    snapshot.stop()
