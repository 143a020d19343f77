"""The optimizer's step where states are in a store that frees memory: one bucket after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from ds_state_stores import is_evicted, owns_storage
from torch import Tensor

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.stepping import Stepper
    from ds_zero.flat import FlatBucket

__all__ = ["tiled_step"]


@torch.no_grad()
def tiled_step(
    optimizer: Optimizer,
    buckets: Sequence[FlatBucket],
    stepper: Stepper,
    grads: Sequence[Tensor | None],
    factor: float,
) -> None:
    """`Stepper.step` where some buckets' states are evicted: those buckets are updated one after the other.

    grads: of the masters of all buckets, in order. While one bucket is updated the next one is fetched; its weights are
    written before its masters are evicted again.
    """
    owners = [b for b in buckets for _ in b.optimized]
    present = [None if b.evictable else g for b, g in zip(owners, grads, strict=True)]
    tiles = [b for b in dict.fromkeys(b for b, g in zip(owners, grads, strict=True) if g is not None) if b.evictable]
    if not tiles or any(g is not None for g in present):
        stepper.step(optimizer, present, factor)
    kept = _settings(optimizer)
    for index, tile in enumerate(tiles):
        store = tile.placement.masters
        assert store is not None
        if index == 0:
            store.fetch(_states(tile, optimizer))
        store.wait(_states(tile, optimizer))
        if index + 1 < len(tiles):
            store.fetch(_states(tiles[index + 1], optimizer))
        stepper.step(optimizer, [g if b is tile else None for b, g in zip(owners, grads, strict=True)], factor)
        tile.update_shard()
        if tile.placement.transfers is not None:
            tile.placement.transfers.synchronize()
        store.evict(_states(tile, optimizer))
        if _settings(optimizer) != kept:
            raise UsageError(
                f"{type(optimizer).__name__} changes its parameter groups in each step, and evicted states are updated "
                "in several steps, so it would count them wrongly; use offload_optimizer.device cpu"
            )


def _states(tile: FlatBucket, optimizer: Optimizer) -> list[Tensor]:
    """The master of a bucket, and its optimizer states with one value per element."""
    found = [tile.master]
    for piece in tile.pieces:
        for value in optimizer.state.get(piece.master, {}).values():
            if isinstance(value, Tensor) and value.shape == piece.master.shape and value.numel():
                if is_evicted(value) or owns_storage(value):
                    found.append(value)
    return found


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
