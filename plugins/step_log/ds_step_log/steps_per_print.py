"""The key ``steps_per_print`` (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_step_log.hooks import printing

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["ds_config", "ds_monitors", "ds_step_end"]


def ds_config() -> type[BaseModel]:
    """The model of ``steps_per_print``."""
    from ds_step_log.config import StepsPerPrint

    return StepsPerPrint


ds_monitors, ds_step_end = printing("steps_per_print")
