"""The declaration of old-checkpointer: its section and its checkpointer (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core.config import Section

if TYPE_CHECKING:
    from ds_core.checkpointer import Checkpointer
    from ds_core.context import Context


class Settings(Section):
    """The section ``old_checkpointer``; it has no keys."""


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_checkpointer(ctx: Context) -> Checkpointer | None:
    """The one that the config names serves; where it names none, one in group ``ds_core.backends``."""
    from old_checkpointer.checkpointer import OldCheckpointer

    return OldCheckpointer()
