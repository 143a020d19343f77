"""The section ``memory_snapshot`` (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_step_log.hooks import LOG, hooks

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.context import Context

__all__ = [
    "ds_checkpoint_loaded",
    "ds_close",
    "ds_config",
    "ds_eval_begin",
    "ds_eval_end",
    "ds_listens",
    "ds_metrics",
    "ds_open",
    "ds_phase_begin",
    "ds_phase_end",
    "ds_step_begin",
    "ds_step_end",
]


def ds_config() -> type[BaseModel]:
    """The model of ``memory_snapshot``."""
    from ds_step_log.config import MemorySnapshot

    return MemorySnapshot


(
    ds_open,
    ds_listens,
    ds_phase_begin,
    ds_phase_end,
    ds_eval_begin,
    ds_eval_end,
    ds_metrics,
    ds_step_end,
    ds_checkpoint_loaded,
) = hooks("memory_snapshot")


def ds_step_begin(ctx: Context) -> None:
    """In the chosen step: look at what is held."""
    if (log := ctx.stash.get(LOG)) is not None and log.snapshot is not None:
        log.snapshot.step_begin()


def ds_close(ctx: Context, error: BaseException | None) -> None:
    """Out of memory: what was held is written. The allocator need remember nothing more."""
    if (log := ctx.stash.get(LOG)) is None or log.snapshot is None:
        return
    if error is not None:
        log.snapshot.failed(error)
    log.snapshot.stop()
