"""The key ``dump_state`` (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_step_log.hooks import dump

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.context import Context

__all__ = ["ds_config", "ds_open"]


def ds_config() -> type[BaseModel]:
    """The model of ``dump_state``."""
    from ds_step_log.config import DumpState

    return DumpState


def ds_open(ctx: Context) -> None:
    """The run is as it will train."""
    if ctx.rank == 0:
        dump(ctx)
