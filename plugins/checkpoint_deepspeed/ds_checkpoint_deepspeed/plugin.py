"""What ds-checkpoint-deepspeed declares: the command ``dscore import`` (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import CommandEntry

__all__ = ["ds_commands"]


def ds_commands() -> Mapping[str, CommandEntry]:
    """``dscore import``."""
    help_line = "Make a checkpoint out of DeepSpeed's files, safetensors or a torch state dict."
    return {"import": CommandEntry("ds_checkpoint_deepspeed.command:import_checkpoint", help_line)}
