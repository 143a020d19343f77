"""What ``optimizer.params`` may hold: checked before a process starts (torch-free)."""

from __future__ import annotations

from pydantic import Field

from ds_core.config import Section


class Params(Section):
    """Keyword arguments of the optimizer."""

    lr: float = Field(0.01, gt=0, description="How far each weight moves in a step.")
    weight_decay: float = Field(0.0, ge=0, description="The part of a weight, times lr, that is taken off in a step.")
