"""The declaration of old-chart: its section and what ``dscore plan`` shows of it (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from ds_core.config import Section
from ds_core.entries import Chart

if TYPE_CHECKING:
    from ds_core.config import RunConfig


class Settings(Section):
    """The section ``old_chart``."""

    steps: int = Field(1000, ge=1, description="Optimizer steps of the run.")


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_charts(config: RunConfig) -> Iterable[Chart]:
    """Nothing runs: only the config is there."""
    from old_chart.chart import draw

    settings = config.section("old_chart")
    assert isinstance(settings, Settings)
    batch = config.core.train_batch_size
    if batch is None:
        return []
    text = f"{settings.steps} steps of {batch} samples: {settings.steps * batch} samples"
    return [Chart("old_chart", "Samples", text, draw(settings.steps, batch))]
