"""What dscore-checkpoint declares: the section ``checkpoint``, the checkpointer, ``dscore
checkpoint`` and the format of safetensors (torch-free).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ds_checkpoint.formats.entry import FormatEntry
from ds_core.entries import CommandEntry

if TYPE_CHECKING:
    from ds_checkpoint.config import CheckpointConfig
    from ds_core.context import Context
    from ds_core.engine import Checkpointer


def ds_config() -> type[CheckpointConfig]:
    """The section's model."""
    from ds_checkpoint.config import CheckpointConfig

    return CheckpointConfig


def ds_checkpointer(ctx: Context) -> Checkpointer | None:
    """Folders of safetensors files, unless the config has another checkpointer beside them, which
    may build on this one.
    """
    if len(ctx.plugins.implementing("ds_checkpointer")) > 1:
        return None
    from ds_checkpoint.checkpointer import FolderCheckpointer

    return FolderCheckpointer(ctx)


def ds_commands() -> Mapping[str, CommandEntry]:
    """``dscore checkpoint``."""
    help_line = "Inspect, verify, compare, convert, export and prune checkpoints."
    return {"checkpoint": CommandEntry("ds_checkpoint.command:app", help_line)}


def ds_checkpoint_formats() -> Mapping[str, FormatEntry]:
    """Weights as Hugging Face keeps them."""
    return {"safetensors": FormatEntry("ds_checkpoint.formats.weights:Safetensors", "weights")}
