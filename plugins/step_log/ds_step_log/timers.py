"""The key ``timers`` (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_step_log.hooks import hooks

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = [
    "ds_checkpoint_loaded",
    "ds_config",
    "ds_eval_begin",
    "ds_eval_end",
    "ds_listens",
    "ds_metrics",
    "ds_open",
    "ds_phase_begin",
    "ds_phase_end",
    "ds_step_end",
]


def ds_config() -> type[BaseModel]:
    """The model of ``timers``."""
    from ds_step_log.config import Timers

    return Timers


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
) = hooks("timers")
