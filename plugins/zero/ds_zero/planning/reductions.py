"""The buffers of gradient reductions in a simulated step without tensors.

It follows `ds_zero.reduce.reducer.Reducer` step by step. Gradients are assumed to arrive in the
reverse order of the parameters.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import torch
from torch import nn

from ds_zero.config import ZeroConfig
from ds_zero.planning.buckets import SimulatedBucket
from ds_zero.planning.states import RankStates
from ds_zero.reduce.reducer import IN_FLIGHT, crowded


class _Memory:
    """Counts the bytes of the reducer's buffer pool, in use or free.

    most: how many free buffers are kept; None: any number.
    """

    def __init__(self, most: int | None) -> None:
        # Elements and dtype of each free buffer, the oldest first.
        self._free: list[tuple[int, torch.dtype]] = []
        self._most = most
        # Bytes now, and the most so far.
        self.live = 0
        self.peak = 0

    def add(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)

    def take(self, numel: int, dtype: torch.dtype) -> None:
        if (numel, dtype) in self._free:
            self._free.remove((numel, dtype))
        else:
            self.add(numel * dtype.itemsize)

    def give(self, numel: int, dtype: torch.dtype) -> None:
        self._free.append((numel, dtype))
        if self._most is not None and len(self._free) > self._most:
            self._drop(*self._free.pop(0))

    def clear(self) -> None:
        while self._free:
            self._drop(*self._free.pop())

    def _drop(self, numel: int, dtype: torch.dtype) -> None:
        self.live -= numel * dtype.itemsize


def reduction(
    queue: Sequence[SimulatedBucket],
    arrivals: Sequence[nn.Parameter],
    section: ZeroConfig,
    states: RankStates,
    world: int,
) -> tuple[int, int]:
    """The bytes of flat gradient buffers: the most at a time, and those between backward and step.

    queue: buckets in the order in which they are reduced.
    arrivals: their parameters in the order in which gradients arrive.
    world: the ranks over which gradients are reduced.
    """
    reducer = _SimulatedReducer(queue, section, states, world)
    # Stage 1 accumulates locally and reduces in the last backward of a step.
    if reducer.keeps and states.run.gas > 1:
        reducer.collect(arrivals)
    # The second backward adds to what there is, and so do all others: two are enough.
    for _ in range(1 if reducer.keeps else min(states.run.gas, 2)):
        reducer.backward(arrivals)
    return reducer.memory.peak, reducer.memory.live


class _SimulatedReducer:
    """Does what `Reducer` does with its buffers."""

    def __init__(
        self,
        queue: Sequence[SimulatedBucket],
        section: ZeroConfig,
        states: RankStates,
        world: int,
    ) -> None:
        # The buckets in the order of their reduction.
        self.queue = queue

        # -- What decides about buffers.

        # Whether they are kept between steps.
        self.keeps = section.stage == 1
        # Whether reductions run while backward goes on.
        self._overlap = section.overlap
        # Whether gradients go into buckets when they arrive; else they stay in ``param.grad``.
        self._eager = section.contiguous_gradients or states.run.precision.accumulate is not None
        self._world = world
        # Whether the reduced shard gets a buffer of its own; stage 1 reduces in place.
        self._separate_shard = section.reduce_scatter and not self.keeps and world > 1
        # Whether reduced gradients are copied to the host.
        self._to_host = any(states.masters(bucket).gradients for bucket in queue)
        self._dtypes = states.dtypes

        # -- The step.

        self.memory = _Memory(None if self.keeps else 2 * IN_FLIGHT)
        self._bucket_of = {p: b for b in queue for p in b.params}
        # Buckets with a buffer of local gradients.
        self._local: set[SimulatedBucket] = set()
        # Buckets whose shard has reduced gradients.
        self._shards: set[SimulatedBucket] = set()
        # Buckets in reduction, the oldest first.
        self._in_flight: deque[SimulatedBucket] = deque()
        # Parameters whose gradient is in ``param.grad``.
        self._waiting: set[nn.Parameter] = set()

    def _sent(self, bucket: SimulatedBucket) -> torch.dtype:
        """The dtype of the buffer that a bucket is reduced in; one rank sends nothing."""
        return self._dtypes.reduced(bucket) if self._world > 1 else self._dtypes.grad(bucket)

    def collect(self, arrivals: Sequence[nn.Parameter]) -> None:
        """A backward without reduction."""
        for param in arrivals:
            self._arrive(param)

    def backward(self, arrivals: Sequence[nn.Parameter]) -> None:
        """A backward that reduces."""
        arrived: Counter[SimulatedBucket] = Counter()
        upcoming = 0
        for param in arrivals:
            bucket = self._bucket_of[param]
            self._arrive(param)
            arrived[bucket] += 1
            # All ranks reduce in one order, so a bucket that is full early waits for those before it.
            while upcoming < len(self.queue) and arrived[self.queue[upcoming]] == len(
                self.queue[upcoming].params
            ):
                self._launch(self.queue[upcoming])
                upcoming += 1
        self._drain()
        if not self.keeps:
            self.memory.clear()

    def _arrive(self, param: nn.Parameter) -> None:
        """A gradient comes, into its bucket or ``param.grad``."""
        if self._eager:
            self._copy_in(self._bucket_of[param])
        elif param not in self._waiting:
            self._waiting.add(param)
            self.memory.add(param.numel() * param.element_size())

    def _copy_in(self, bucket: SimulatedBucket) -> None:
        """Give the bucket a buffer, if it has none; older reductions end first where they are many."""
        if bucket in self._local:
            return
        while not self.keeps and crowded(self._sent_bytes(b) for b in self._in_flight):
            self._complete(self._in_flight.popleft())
        self.memory.take(bucket.layout.total, self._dtypes.grad(bucket))
        self._local.add(bucket)

    def _sent_bytes(self, bucket: SimulatedBucket) -> int:
        """Bytes of the buffer that a bucket is reduced in."""
        return bucket.layout.total * self._sent(bucket).itemsize

    def _launch(self, bucket: SimulatedBucket) -> None:
        """Start a reduction."""
        memory = self.memory
        self._copy_in(bucket)
        self._local.discard(bucket)
        for param in self._waiting.intersection(bucket.params):
            self._waiting.discard(param)
            memory.live -= param.numel() * param.element_size()
        # The copy in the dtype of the message takes the place of the gradients.
        sent = self._sent(bucket)
        if sent != self._dtypes.grad(bucket):
            memory.take(bucket.layout.total, sent)
            memory.give(bucket.layout.total, self._dtypes.grad(bucket))
        if self._separate_shard:
            memory.take(bucket.layout.shard_numel, sent)
        self._in_flight.append(bucket)
        if not self._overlap:
            self._drain()

    def _drain(self) -> None:
        """End all reductions."""
        while self._in_flight:
            self._complete(self._in_flight.popleft())

    def _complete(self, bucket: SimulatedBucket) -> None:
        """End a reduction: its result becomes the shard, or is added to it."""
        memory = self.memory
        shard = bucket.layout.shard_numel
        total = bucket.layout.total
        grad = self._dtypes.grad(bucket)
        sent = self._sent(bucket)
        first = bucket not in self._shards and not self._to_host
        self._shards.add(bucket)
        # The first result is kept where it is, if that is no larger than a shard or is kept anyway.
        if first and sent == grad and (self._separate_shard or self.keeps or self._world == 1):
            if self._separate_shard:
                memory.give(total, sent)
            return
        if first:
            memory.take(shard, grad)
        memory.give(total, sent)
        if self._separate_shard:
            memory.give(shard, sent)
