"""How the weights of a bucket are gathered, and how its gradients are reduced to their owners.

Units and the reducer say when, these classes say how. Those of this module send weights and
gradients as they are; others send fewer bits, or over fewer links. The ranks of a bucket start them
in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core import comm

if TYPE_CHECKING:
    from jaxtyping import Shaped

    from ds_zero.buckets.flat import FlatBucket
    from ds_zero.config import ZeroConfig

Works = list[Any]
Room = Callable[["FlatBucket", Tensor], Tensor]
"""(bucket, source) -> memory for the reduced shard of `source`."""


class Chain:
    """Collectives that follow each other: each of `then` is called when those before have ended,
    and starts the next.

    The last of `then` may start none and only finish the result.
    """

    def __init__(self, works: Sequence[Any], *then: Callable[[], Sequence[Any]]) -> None:
        self._works = works
        self._then = deque(then)

    def advance(self) -> None:
        """Start the next ones now, after those before."""
        for work in self._works:
            work.wait()
        self._works = self._then.popleft()() if self._then else ()

    def wait(self) -> None:
        """Wait until the last one has ended, and the result is there."""
        while self._works or self._then:
            self.advance()


# -- weights ---------------------------------------------------------------------------------------


class WeightGather(ABC):
    """How all shards of a bucket come into its `full`, which has memory.

    dtype: in which weights are sent, if not in their own.
    """

    dtype: torch.dtype | None = None

    @property
    def exact(self) -> bool:
        """Whether weights come with their own bits."""
        return self.dtype is None

    @abstractmethod
    def start(self, bucket: FlatBucket) -> Works:
        """Start to fill ``bucket.full``, of several ranks; returns what to wait for."""


@dataclass(frozen=True, slots=True)
class AllGather(WeightGather):
    """One all-gather."""

    dtype: torch.dtype | None = None

    def start(self, bucket: FlatBucket) -> Works:
        """See `WeightGather.start`."""
        return all_gather(bucket.full, bucket.own(), self.dtype or bucket.dtype, bucket.group)


@dataclass(frozen=True, slots=True)
class AllReduce(WeightGather):
    """One all-reduce of zero-padded buffers."""

    dtype: torch.dtype | None = None

    def start(self, bucket: FlatBucket) -> Works:
        """See `WeightGather.start`."""
        low = message_for(bucket.full, self.dtype or bucket.dtype).zero_()
        mine = bucket.own()
        place = bucket.own_shard(low)
        if mine.data_ptr() != place.data_ptr():
            place.copy_(mine)
        return cast_after(comm.all_reduce(low, group=bucket.group, async_op=True), low, bucket.full)


@dataclass(frozen=True, slots=True)
class Broadcasts(WeightGather):
    """Each rank broadcasts its shard."""

    def start(self, bucket: FlatBucket) -> Works:
        """See `WeightGather.start`. `full` has this rank's shard already."""
        bucket.own()
        ranks = torch.distributed.get_process_group_ranks(bucket.group)
        return [
            comm.broadcast(part, src=rank, group=bucket.group, async_op=True)
            for part, rank in zip(bucket.shards(bucket.full), ranks, strict=True)
        ]


def all_gather(
    full: Shaped[Tensor, " full"], mine: Shaped[Tensor, " shard"], dtype: torch.dtype, group: Any
) -> Works:
    """Start to fill `full` with what all ranks have, sent in `dtype`."""
    low = message_for(full, dtype)
    work = comm.all_gather_into_tensor(low, mine.to(dtype), group=group, async_op=True)
    return cast_after(work, low, full)


def message_for(full: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory of `dtype` for what comes into `full`: itself, where it has that dtype."""
    return full if dtype == full.dtype else torch.empty_like(full, dtype=dtype)


def cast_after(work: Any, low: Tensor, out: Tensor) -> Works:
    """`work` on `low`, whose result is then cast into `out` where that is another tensor."""

    def finish() -> Works:
        out.copy_(low)
        return []

    return [work if low is out else Chain([work], finish)]


def weight_gather(section: ZeroConfig, dtype: torch.dtype | None = None) -> WeightGather:
    """How the config wants weights gathered for modules."""
    return AllReduce(dtype) if section.use_all_reduce_for_fetch_params else AllGather(dtype)


# -- gradients -------------------------------------------------------------------------------------


GradientReduce = Callable[["FlatBucket", Tensor, Any, Room], tuple[Works, Tensor]]
"""(bucket, source, group, room) -> works, shard: starts to sum gradients over the ranks of a bucket,
each rank getting its own shard.

source: the gradients, in the layout of the bucket; it may be overwritten.
group: the bucket's ranks, of which there are several, in its order; no other collectives are on it.
works: what to wait for.
shard: where this rank's shard of the sum is then: `room`'s memory, or a view of `source`.
"""


def reduce_scatter(
    bucket: FlatBucket, source: Shaped[Tensor, " full"], group: Any, room: Room
) -> tuple[Works, Shaped[Tensor, " shard"]]:
    """One reduce-scatter."""
    out = room(bucket, source)
    return [comm.reduce_scatter_tensor(out, source, group=group, async_op=True)], out


def all_reduce(
    bucket: FlatBucket, source: Shaped[Tensor, " full"], group: Any, room: Room
) -> tuple[Works, Shaped[Tensor, " shard"]]:
    """One all-reduce."""
    return [comm.all_reduce(source, group=group, async_op=True)], bucket.own_shard(source)


def reduce_to_owners(
    bucket: FlatBucket, source: Shaped[Tensor, " full"], group: Any, room: Room
) -> tuple[Works, Shaped[Tensor, " shard"]]:
    """One reduction to each owner."""
    ranks = torch.distributed.get_process_group_ranks(group)
    works = [
        comm.reduce(part, dst=rank, group=group, async_op=True)
        for part, rank in zip(bucket.shards(source), ranks, strict=True)
    ]
    return works, bucket.own_shard(source)


def gradient_reduce(section: ZeroConfig) -> GradientReduce:
    """How the config wants gradients reduced."""
    if section.reduce_scatter:
        return reduce_scatter
    return all_reduce if section.use_multi_rank_bucket_allreduce else reduce_to_owners
