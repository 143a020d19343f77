"""What ``scheduler.params`` may hold: checked before a process starts (torch-free)."""

from __future__ import annotations

from pydantic import Field

from ds_core.config import Section


class Params(Section):
    """Keyword arguments of the schedule."""

    every: int = Field(100, ge=1, description="Optimizer steps after which the learning rates are halved.")
