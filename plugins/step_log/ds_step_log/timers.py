"""The key ``timers`` (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["ds_config"]


def ds_config() -> type[BaseModel]:
    """The model of ``timers``."""
    from ds_step_log.config import Timers

    return Timers
