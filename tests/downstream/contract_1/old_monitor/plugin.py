"""The declaration of old-monitor: its section and its monitor (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from ds_core.config import Section

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.telemetry import Monitor


class Settings(Section):
    """The section ``old_monitor``."""

    file: str = Field(min_length=1, description="The file that gets one line of JSON per event.")


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_monitors(ctx: Context) -> Iterable[Monitor]:
    """Asked on rank 0 only. `Background` writes in a thread, so that no step waits for a file."""
    from ds_monitor_kit import Background

    from old_monitor.monitor import OldMonitor

    settings = ctx.config.section("old_monitor")
    assert isinstance(settings, Settings)
    return [Background(OldMonitor(settings.file))]
