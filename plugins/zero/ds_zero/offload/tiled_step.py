"""The optimizer's step over all buckets: those that a store evicts are updated one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core.errors import UsageError
from ds_zero.buckets.evicted import Evicted

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.partition import Stepper
    from ds_zero.reduce.source import GradientSource


def step(
    optimizer: Optimizer,
    source: GradientSource,
    stepper: Stepper,
    grads: Sequence[Tensor | None],
    factor: float,
    *,
    ahead: bool,
) -> None:
    """`Stepper.step` for the buckets of `source`.

    grads: of the masters of all buckets, in order; for evicted buckets views of
        ``source.reduced(bucket)``, which may be evicted too.
    ahead: while one bucket is updated the next one is fetched.

    Weights are written before their masters are evicted again; the store may save both behind the
    step.
    """
    owners = [b.masters for b in source.buckets for _ in b.masters.fragments]
    with_grads = dict.fromkeys(m for m, g in zip(owners, grads, strict=True) if g is not None)
    tiles = [m for m in with_grads if isinstance(m, Evicted)]
    present = [g if m.evicts is None else None for m, g in zip(owners, grads, strict=True)]
    if not tiles or any(g is not None for g in present):
        stepper.step(optimizer, present, factor)
    if not tiles:
        return
    fragments = [p for b in source.buckets for p in b.masters.fragments]
    kept = settings_of(optimizer)
    for tile, following in zip(tiles, [*tiles[1:], None], strict=True):
        mine = [g if m is tile else None for m, g in zip(owners, grads, strict=True)]
        unused = [
            p for p, m, g in zip(fragments, owners, grads, strict=True) if m is tile and g is None
        ]
        needed: list[Tensor] = []
        if following is not None and ahead:
            needed = [*source.reduced(following.bucket), *following.states(optimizer)]
        # Without a gradient for every element, the weights of others must be read first.
        written = sum(g.numel() for g in mine if g is not None)
        all_used = written == sum(p.master.numel() for p in tile.fragments)
        reduced = source.reduced(tile.bucket)
        with torch.no_grad(), tile.step(optimizer, reduced, needed, all_used=all_used):
            stepper.step(optimizer, mine, factor)
            tile.write_back(unused)
            if tile.bucket.placement.transfers is not None:
                tile.bucket.placement.transfers.synchronize()
        if settings_of(optimizer) != kept:
            raise UsageError(
                f"{type(optimizer).__name__} changes its parameter groups in each step, and "
                "evicted states are updated "
                "in several steps, so it would count them wrongly; use offload_optimizer.device cpu"
            )


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Everything of the parameter groups but parameters."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
