"""Where a bucket's masters are kept: the choice of a class, for training and for plans."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ds_zero.buckets.evicted import Evicted
from ds_zero.buckets.masters import Deferred, DeviceCopy, InStore, Masters
from ds_zero.buckets.sizes import choose_dtype
from ds_zero.buckets.weights import HostShard, Weights

if TYPE_CHECKING:
    from ds_zero.buckets.flat import FlatBucket
    from ds_zero.offload.placement import StatePlacement


def masters_kind(
    weights: type[Weights], *, same: bool, resident: bool | None, deferred: bool = False
) -> type[Masters]:
    """The masters of a bucket that an optimizer updates; also for plans, which have no tensors.

    same: whether masters have the dtype of the weights.
    resident: whether their store keeps them in memory; None: there is no store.
    deferred: whether they are updated at other times.
    """
    if resident is None:
        on_device = not issubclass(weights, HostShard)
        return Masters if same and on_device else DeviceCopy
    if deferred:
        return Deferred
    if not resident:
        return Evicted
    # The host's step can update weights in place that stay in its memory in the masters' dtype.
    return Masters if same and weights is HostShard else InStore


@torch.no_grad()
def choose_masters(
    bucket: FlatBucket, placement: StatePlacement, wanted: torch.dtype | None, *, updated: bool
) -> Masters:
    """The masters of `bucket`, made from its weights, which are in memory.

    wanted: the dtype of master weights; None: that of the weights.
    updated: whether an optimizer gets them.
    """
    weights = bucket.weights
    store = placement.masters if bucket.trains else None
    dtype = choose_dtype(bucket.dtype, wanted)
    kind = masters_kind(
        type(weights),
        same=dtype == bucket.dtype,
        resident=None if store is None else store.resident,
        deferred=placement.deferred,
    )
    if not updated or not bucket.trains or kind is Masters:
        return Masters(bucket, weights.shard, store)
    if store is None:
        return kind(bucket, bucket.own_shard(bucket.full).to(dtype, copy=True), None)
    return kind(bucket, store.copy_in(weights.shard, dtype), store)
