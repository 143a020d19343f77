"""The optimizer's step where states are in a store that frees memory: one bucket after the other.

[Note: joined] Optimizers make one tensor per state and parameter. Those of a bucket are joined into
one tensor per state, of which they become views, so that a store reads and writes few large
tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from ds_state_stores import is_evicted, owns_storage
from torch import Tensor

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_state_stores import StateStore
    from torch.optim import Optimizer

    from ds_core.stepping import Stepper
    from ds_zero.buckets.flat import FlatBucket


@torch.no_grad()
def tiled_step(
    optimizer: Optimizer,
    buckets: Sequence[FlatBucket],
    stepper: Stepper,
    grads: Sequence[Tensor | None],
    factor: float,
    *,
    ahead: bool,
    reduced: Callable[[FlatBucket], Tensor | None],
) -> None:
    """`Stepper.step` where some buckets' states are evicted: those buckets are updated one after
    the other.

    grads: of the masters of all buckets, in order; for evicted buckets views of
    ``reduced(bucket)``, which may be evicted too. ahead: while one bucket is updated the next one
    is fetched. Weights are written before their masters are evicted again; the store may save both
    behind the step.
    """
    owners = [b for b in buckets for _ in b.optimized]
    pieces = [p for b in buckets for p in b.optimized]
    present = [None if b.evictable else g for b, g in zip(owners, grads, strict=True)]
    tiles = [
        b
        for b in dict.fromkeys(b for b, g in zip(owners, grads, strict=True) if g is not None)
        if b.evictable
    ]
    if not tiles or any(g is not None for g in present):
        stepper.step(optimizer, present, factor)
    kept = settings_of(optimizer)
    for index, tile in enumerate(tiles):
        mine = [g if b is tile else None for b, g in zip(owners, grads, strict=True)]
        unused = (
            p for p, g, b in zip(pieces, grads, owners, strict=True) if b is tile and g is None
        )
        following = tiles[index + 1] if ahead and index + 1 < len(tiles) else None
        with _in_memory(tile, optimizer, mine, reduced, following):
            stepper.step(optimizer, mine, factor)
            tile.update_shard(unused)
            if tile.placement.transfers is not None:
                tile.placement.transfers.synchronize()
        if settings_of(optimizer) != kept:
            raise UsageError(
                f"{type(optimizer).__name__} changes its parameter groups in each step, and "
                "evicted states are updated "
                "in several steps, so it would count them wrongly; use offload_optimizer.device cpu"
            )


@contextlib.contextmanager
def _in_memory(
    tile: FlatBucket,
    optimizer: Optimizer,
    grads: Sequence[Tensor | None],
    reduced: Callable[[FlatBucket], Tensor | None],
    following: FlatBucket | None,
) -> Iterator[None]:
    """Inside, the states and gradients of `tile` are in memory, and those of `following` are
    fetched.
    """
    store = tile.placement.masters
    assert store is not None
    used = [g for g in (reduced(tile),) if g is not None]
    states = states_of(tile, optimizer)
    store.fetch(used + states)
    shard = tile.away if tile.away is not None and tile.staged is tile.shard else None
    if shard is not None:
        shard.hold(
            fresh=sum(g.numel() for g in grads if g is not None)
            == sum(p.master.numel() for p in tile.pieces)
        )
    store.wait(used + states)
    if following is not None:
        store.fetch(
            [g for g in (reduced(following),) if g is not None] + states_of(following, optimizer)
        )
    yield
    store.evict(used, changed=False)
    if shard is not None:
        shard.drop(changed=True)
    _join(tile, optimizer, store)
    store.evict(states_of(tile, optimizer))


def _join(tile: FlatBucket, optimizer: Optimizer, store: StateStore) -> None:
    """Move states that have memory of their own into those of the bucket; see [Note: joined].

    They are in memory.
    """
    made = {t.untyped_storage()._cdata for t in tile.joined.values()}
    for piece in tile.pieces:
        state = optimizer.state.get(piece.master, {})
        for key, value in state.items():
            if (
                not _is_moment(value, piece.master)
                or not owns_storage(value)
                or value.untyped_storage()._cdata in made
            ):
                continue
            joined = tile.joined.get(key)
            if joined is None:
                joined = tile.joined[key] = store.buffer(tile.master.numel(), value.dtype).zero_()
                made.add(joined.untyped_storage()._cdata)
            if joined.dtype == value.dtype:
                state[key] = joined[piece.within].view(value.shape).copy_(value)
                store.discard([value])


def states_of(tile: FlatBucket, optimizer: Optimizer) -> list[Tensor]:
    """The master of a bucket, and its optimizer states with one value per element: one tensor of
    each storage.
    """
    found = {t.untyped_storage()._cdata: t for t in (tile.master, *tile.joined.values())}
    for piece in tile.pieces:
        for value in optimizer.state.get(piece.master, {}).values():
            if (
                _is_moment(value, piece.master)
                and (key := value.untyped_storage()._cdata) not in found
            ):
                if is_evicted(value) or owns_storage(value):
                    found[key] = value
    return list(found.values())


def _is_moment(value: Any, master: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == master.shape and value.numel() > 0


def settings_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Everything of the parameter groups but parameters."""
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
