"""The key ``dump_state`` (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_step_log.hooks import dump

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pydantic import BaseModel

    from ds_core.context import Context
    from ds_core.telemetry import Monitor

__all__ = ["ds_config", "ds_monitors"]


def ds_config() -> type[BaseModel]:
    """The model of ``dump_state``."""
    from ds_step_log.config import DumpState

    return DumpState


def ds_monitors(ctx: Context) -> Iterable[Monitor]:
    """No monitor: this is where rank 0 hears that the engine is being built."""
    dump(ctx)
    return ()
