"""The declaration of old-metrics: its section and its metrics (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from ds_core.config import Section

if TYPE_CHECKING:
    from torch import Tensor

    from ds_core.context import Context


class Settings(Section):
    """The section ``old_metrics``."""

    every: int = Field(1, ge=1, description="Steps from one number to the next.")


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_metrics(ctx: Context, step: int) -> Mapping[str, float | Tensor]:
    """Called after a step, where anybody reads. A 0-d tensor on the device is not waited for here."""
    settings = ctx.config.section("old_metrics")
    assert isinstance(settings, Settings)
    if step % settings.every or ctx.module is None:
        return {}
    largest = [p.detach().abs().max() for p in ctx.module.parameters() if p.numel()]
    return {"Train/Samples/largest_weight": max(largest)} if largest else {}
