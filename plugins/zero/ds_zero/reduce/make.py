"""Where the gradients of a partitioner's buckets go: the choice of a `GradientSource`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ds_zero.reduce.local_grads import LocalGradients
from ds_zero.reduce.reducer import Reducer

if TYPE_CHECKING:
    from ds_zero.base import ZeroPartitioner
    from ds_zero.buckets.flat import FlatBucket
    from ds_zero.reduce.source import GradientSource


def make_reducer(owner: ZeroPartitioner, buckets: Sequence[FlatBucket]) -> GradientSource:
    """The source of gradients for `buckets`."""
    return (LocalGradients if _stay_local(owner, buckets) else Reducer)(owner, buckets)


def _stay_local(owner: ZeroPartitioner, buckets: Sequence[FlatBucket]) -> bool:
    """Whether gradients of `buckets` can stay where autograd leaves them."""
    ctx = owner.ctx
    accumulate = ctx.precision.accumulate
    return (
        ctx.mesh.size("dp") == 1
        and ctx.grain == "element"
        and all(b.masters.store is None and b.weights.on_host is None for b in buckets)
        # A gradient can stay in param.grad only where it accumulates in the parameter's own dtype.
        and all(accumulate in (None, b.dtype) for b in buckets)
    )
