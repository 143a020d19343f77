"""The part inside a run that a tuner started: time its steps, or measure its model, write that down, and end it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_autotuning.config import Autotuning
    from ds_core.context import Context
    from ds_core.entries import Request

__all__ = ["Measuring"]


class Measuring:
    """Of one rank."""

    def __init__(self, ctx: Context, section: Autotuning) -> None:
        self.ctx = ctx
        self.section = section

    def step_begin(self, step: int) -> None:
        """`step` counts from 0."""

    def step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """`step` counts from 0."""

    def request(self, step: int) -> Request | None:
        """What to ask of all ranks after `step`."""
        return None

    def failed(self, error: BaseException) -> None:
        """Write why it ended."""
