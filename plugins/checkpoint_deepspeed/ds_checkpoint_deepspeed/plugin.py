"""What dscore-checkpoint-deepspeed declares: commands of ``dscore``, and the format of DeepSpeed's
checkpoints (torch-free).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ds_core.entries import CommandEntry

if TYPE_CHECKING:
    from ds_checkpoint.formats.entry import FormatEntry


def ds_commands() -> Mapping[str, CommandEntry]:
    """``dscore import``, which is ``dscore checkpoint import`` too, and ``dscore checkpoint
    export-deepspeed``.
    """
    take = CommandEntry(
        "ds_checkpoint_deepspeed.command:import_checkpoint",
        "Make a checkpoint out of DeepSpeed's files, safetensors or a torch state dict.",
    )
    give = CommandEntry(
        "ds_checkpoint_deepspeed.command:export_deepspeed",
        "Write a checkpoint in DeepSpeed's form.",
    )
    return {"import": take, "checkpoint import": take, "checkpoint export-deepspeed": give}


def ds_checkpoint_formats() -> Mapping[str, FormatEntry]:
    """DeepSpeed's own."""
    from ds_checkpoint.formats.entry import FormatEntry

    carries = (
        "weights, optimizer states, hyperparameters, steps, schedule, loss scale, client state"
    )
    return {"deepspeed": FormatEntry("ds_checkpoint_deepspeed.format:DeepSpeed", carries)}
