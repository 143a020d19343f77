"""Which parameters share a bucket, and the buckets that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from ds_core import comm
from ds_core.context import StashKey
from ds_core.gradients import arrange
from ds_core.partition import COUNTED_ELSEWHERE
from ds_zero.buckets.flat import FlatBucket
from ds_zero.comm.hierarchy import sharding_axes
from ds_zero.offload.placement import ON_DEVICE, StatePlacement

if TYPE_CHECKING:
    from ds_core.context import Context

HOST_BYTES = 1 << 23
"""The most bytes of a bucket in host memory whose gradient buffer is freed in each step, or which
is reduced during backward. The allocator keeps freed memory only up to some size; above it every
step pays for fresh pages: 70 of 410 ms CPU time for 114 MB."""


def needs_full_tensors(ctx: Context) -> bool:
    """Whether the optimizer must see full tensors: unless it is declared to be element-wise."""
    return ctx.grain != "element"


_TIED: StashKey[frozenset[str]] = StashKey("tied parameters of any rank")


def note_tied(ctx: Context) -> None:
    """Learn which parameters have copies on other ranks, which only the copies' ranks know.
    Collective, before `make_buckets`.
    """
    copies = ctx.stash.get(COUNTED_ELSEWHERE)
    mine = [] if copies is None else sorted(copies)
    ctx.stash[_TIED] = frozenset(n for names in comm.all_gather_json(mine) for n in names)


def make_buckets(
    params: Sequence[nn.Parameter],
    ctx: Context,
    capacity: Callable[[int], int],
    *,
    sharded: bool = False,
    masters: bool = True,
    placement: Callable[[nn.Parameter], StatePlacement] = lambda param: ON_DEVICE,
    small_on_host: bool = False,
) -> list[FlatBucket]:
    """Assign `params` to buckets in reverse order, which is about the order in which backward
    finishes them. Collective over their replicas.

    capacity: world size -> the most elements of a bucket.
    masters: whether an optimizer will update them. Frozen parameters have buckets of their own,
        which are not reduced until they are thawed.
    placement: where each parameter's states are.
    small_on_host: buckets in host memory have at most `HOST_BYTES`.
    """

    tied = ctx.stash.get(_TIED) or ()

    def kind(param: nn.Parameter) -> tuple[Any, ...]:
        info = ctx.params[param]
        return (
            info.replicas,
            info.held,
            info.counted,
            param.dtype,
            param.device,
            param.requires_grad,
            placement(param),
            # Ranks with a copy cut it at the same places then, so that what they add up over
            # their parts, in optimizers too, has the same bits.
            info.name if info.name in tied else "",
        )

    def most(key: tuple[Any, ...]) -> int:
        replicas, _, _, dtype, device, *_ = key
        limit = capacity(ctx.mesh.size(*sharding_axes(ctx.mesh, replicas)))
        on_host = small_on_host and device.type == "cpu"
        return min(limit, HOST_BYTES // dtype.itemsize) if on_host else limit

    runs = arrange(params, kind, lambda key, filled, size: filled + size > most(key))
    buckets = []
    for run in runs:
        bucket = FlatBucket(run, [ctx.params[p] for p in run], ctx.mesh)
        bucket.fill(ctx.mesh)
        # Masters that are full tensors are made when all buckets are there, see `assign_owners`.
        updated = masters and not needs_full_tensors(ctx)
        bucket.place(placement(run[0]), ctx.precision.master, sharded=sharded, updated=updated)
        buckets.append(bucket)
    return buckets
