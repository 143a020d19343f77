"""The transform of what saves memory on one rank: tiled layers and losses, activations in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ds_core.context import StashKey
from ds_sequence_parallel.config import settings
from ds_sequence_parallel.offload import offload_blocks
from ds_sequence_parallel.tile_model import tile_loss, tile_mlps
from ds_sequence_parallel.transform import SHARDED

if TYPE_CHECKING:
    from torch import nn

    from ds_core.context import Context

__all__ = ["save_memory", "undo"]

_UNDO: StashKey[list[Callable[[], None]]] = StashKey("ds-sequence-parallel changes of the model")


def save_memory(model: nn.Module, ctx: Context) -> nn.Module:
    """Do what the section asks for; parameters and their names stay."""
    asked = settings(ctx.config)
    done: list[Callable[[], None]] = []
    ctx.stash[_UNDO] = done
    if asked.tiled_mlp is not None:
        done.append(tile_mlps(model, asked.tiled_mlp))
    if asked.tiled_loss is not None:
        done.append(tile_loss(model, asked.tiled_loss, ctx.stash.get(SHARDED)))
    if asked.offload_activations is not None:
        done.append(offload_blocks(model, asked.offload_activations, ctx.accelerator))
    return model


def undo(ctx: Context) -> None:
    """Undo `save_memory`."""
    if (done := ctx.stash.get(_UNDO)) is not None:
        for step in reversed(done):
            step()
