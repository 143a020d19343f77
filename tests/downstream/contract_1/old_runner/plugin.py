"""The declaration of old-runner: its section and its runner (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core.config import Section

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.runner import Runner


class Settings(Section):
    """The section ``old_runner``; it has no keys."""


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_runner(ctx: Context) -> Runner | None:
    """Who turns micro-batches into forwards and backwards; one plugin of a run can."""
    from old_runner.runner import OldRunner

    return OldRunner()
