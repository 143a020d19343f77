"""What dscore-checkpoint-dcp declares: two formats of checkpoints (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_checkpoint.formats.entry import FormatEntry


def ds_checkpoint_formats() -> Mapping[str, FormatEntry]:
    """Those of torch.distributed.checkpoint and of Megatron-core."""
    from ds_checkpoint.formats.entry import FormatEntry

    both = "weights, optimizer states, hyperparameters, steps"
    return {
        "dcp": FormatEntry("ds_checkpoint_dcp.formats:Dcp", f"{both}, schedule"),
        "megatron": FormatEntry("ds_checkpoint_dcp.formats:Megatron", both),
    }
