"""The transform of what saves memory on one rank: tiled layers and losses, activations in host
memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_sequence_parallel.config import settings
from ds_sequence_parallel.tiles.offload import offload_blocks
from ds_sequence_parallel.tiles.tile_model import tile_loss, tile_mlps
from ds_sequence_parallel.transform import SHARDED

if TYPE_CHECKING:
    from torch import nn

    from ds_core.context import Context


def save_memory(model: nn.Module, ctx: Context) -> nn.Module:
    """Do what the section asks for; parameters and their names stay."""
    asked = settings(ctx.config)
    if asked.tiled_mlp is not None:
        ctx.undo(tile_mlps(model, asked.tiled_mlp))
    if asked.tiled_loss is not None:
        ctx.undo(tile_loss(model, asked.tiled_loss, ctx.stash.get(SHARDED)))
    if asked.offload_activations is not None:
        ctx.undo(offload_blocks(model, asked.offload_activations, ctx.accelerator))
    return model
