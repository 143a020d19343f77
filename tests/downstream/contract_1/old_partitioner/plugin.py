"""The declaration of old-partitioner: its section and its partitioner (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core.config import Section

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.partition import Partitioner


class Settings(Section):
    """The section ``old_partitioner``; it has no keys."""


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_partitioner(ctx: Context) -> Partitioner | None:
    """Who owns how model states lie over ranks; one plugin of a run can."""
    from old_partitioner.partitioner import OldPartitioner

    return OldPartitioner(ctx)
