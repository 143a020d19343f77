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
        mine = bucket.own()
        full = bucket.full
        if self.dtype is None:
            return [comm.all_gather_into_tensor(full, mine, group=bucket.group, async_op=True)]
        low = torch.empty_like(full, dtype=self.dtype)
        work = comm.all_gather_into_tensor(
            low, mine.to(self.dtype), group=bucket.group, async_op=True
        )
        return [cast_after(work, low, full)]


@dataclass(frozen=True, slots=True)
class AllReduce(WeightGather):
    """One all-reduce of zero-padded buffers."""

    dtype: torch.dtype | None = None

    def start(self, bucket: FlatBucket) -> Works:
        """See `WeightGather.start`."""
        full = bucket.full
        low = full if self.dtype is None else torch.empty_like(full, dtype=self.dtype)
        low.zero_()
        mine = bucket.own()
        place = bucket.own_shard(low)
        if mine.data_ptr() != place.data_ptr():
            place.copy_(mine)
        work = comm.all_reduce(low, group=bucket.group, async_op=True)
        return [work if low is full else cast_after(work, low, full)]


@dataclass(frozen=True, slots=True)
class Broadcasts(WeightGather):
    """Each rank broadcasts its shard."""

    def start(self, bucket: FlatBucket) -> Works:
        """See `WeightGather.start`. `full` has this rank's shard already."""
        bucket.own()
        group = bucket.group
        parts = bucket.shards(bucket.full)
        ranks = torch.distributed.get_process_group_ranks(group)
        return [
            comm.broadcast(parts[i], src=rank, group=group, async_op=True)
            for i, rank in enumerate(ranks)
        ]


def cast_after(work: Any, low: Tensor, out: Tensor) -> Chain:
    """`work` on `low`, whose result is then cast into `out`."""

    def finish() -> Works:
        out.copy_(low)
        return []

    return Chain([work], finish)


def weight_gather(section: ZeroConfig, dtype: torch.dtype | None = None) -> WeightGather:
    """How the config wants weights gathered for modules."""
    return AllReduce(dtype) if section.use_all_reduce_for_fetch_params else AllGather(dtype)


# -- gradients -------------------------------------------------------------------------------------


class GradientReduce(ABC):
    """How gradients in the layout of a bucket are summed over its ranks, each rank getting its own
    shard.
    """

    @abstractmethod
    def start(
        self, bucket: FlatBucket, source: Shaped[Tensor, " full"], group: Any, room: Room
    ) -> tuple[Works, Shaped[Tensor, " shard"]]:
        """Start to reduce `source`, of several ranks, which it may overwrite.

        Returns what to wait for, and the tensor that this rank's shard of the sum is in then:
        `room`'s, or a view of `source`.

        group: the bucket's ranks, in its order; no other collectives are on it.
        """


@dataclass(frozen=True, slots=True)
class ReduceScatter(GradientReduce):
    """One reduce-scatter."""

    def start(
        self, bucket: FlatBucket, source: Shaped[Tensor, " full"], group: Any, room: Room
    ) -> tuple[Works, Shaped[Tensor, " shard"]]:
        """See `GradientReduce.start`."""
        out = room(bucket, source)
        return [comm.reduce_scatter_tensor(out, source, group=group, async_op=True)], out


@dataclass(frozen=True, slots=True)
class AllReduced(GradientReduce):
    """One all-reduce."""

    def start(
        self, bucket: FlatBucket, source: Shaped[Tensor, " full"], group: Any, room: Room
    ) -> tuple[Works, Shaped[Tensor, " shard"]]:
        """See `GradientReduce.start`."""
        return [comm.all_reduce(source, group=group, async_op=True)], bucket.own_shard(source)


@dataclass(frozen=True, slots=True)
class ReduceToOwners(GradientReduce):
    """One reduction to each owner."""

    def start(
        self, bucket: FlatBucket, source: Shaped[Tensor, " full"], group: Any, room: Room
    ) -> tuple[Works, Shaped[Tensor, " shard"]]:
        """See `GradientReduce.start`."""
        ranks = torch.distributed.get_process_group_ranks(group)
        parts = bucket.shards(source)
        works = [
            comm.reduce(parts[i], dst=rank, group=group, async_op=True)
            for i, rank in enumerate(ranks)
        ]
        return works, bucket.own_shard(source)


def gradient_reduce(section: ZeroConfig) -> GradientReduce:
    """How the config wants gradients reduced."""
    if section.reduce_scatter:
        return ReduceScatter()
    return AllReduced() if section.use_multi_rank_bucket_allreduce else ReduceToOwners()
