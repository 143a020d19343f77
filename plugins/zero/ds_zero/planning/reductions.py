"""The buffers of gradient reductions in a simulated step without tensors.

It follows `ds_zero.reduce.reducer.Reducer` step by step. Gradients are assumed to arrive in the
reverse order of the parameters.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ds_zero.planning.buckets import SimulatedBucket
from ds_zero.reduce.reducer import IN_FLIGHT, crowded


@dataclass(frozen=True, slots=True)
class ReducerRules:
    """What decides the buffers of a reducer."""

    world: int
    """Ranks over which gradients are reduced."""

    keeps: bool
    """Buffers are kept between steps (stage 1)."""

    overlap: bool
    """Reductions run while backward goes on."""

    eager: bool
    """Gradients go into buckets when they arrive; else they stay in ``param.grad``."""

    scatter: bool
    """Gradients are reduce-scattered, not all-reduced."""

    to_host: bool
    """Reduced gradients are copied to the host."""

    grad: Callable[[SimulatedBucket], torch.dtype]
    """The dtype in which a bucket's gradients accumulate."""

    reduced: Callable[[SimulatedBucket], torch.dtype]
    """The dtype in which they are sent."""

    def sent(self, bucket: SimulatedBucket) -> torch.dtype:
        """The dtype of the buffer that a bucket is reduced in; one rank sends nothing."""
        return self.reduced(bucket) if self.world > 1 else self.grad(bucket)

    @property
    def separate_shard(self) -> bool:
        """Whether the reduced shard gets a buffer of its own; stage 1 reduces in place."""
        return self.scatter and not self.keeps and self.world > 1


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
    rules: ReducerRules,
    passes: int,
    waits: bool,
) -> tuple[int, int]:
    """The bytes of flat gradient buffers: the most at a time, and those between backward and step.

    queue: buckets in the order in which they are reduced. arrivals: their parameters in the order
    in which gradients arrive. passes: backwards per step that reduce. waits: whether backwards
    without reduction come before them.
    """
    reducer = _SimulatedReducer(queue, rules)
    if waits:
        reducer.collect(arrivals)
    # The second backward adds to what there is, and so do all others: two are enough.
    for _ in range(min(passes, 2)):
        reducer.backward(arrivals)
    return reducer.memory.peak, reducer.memory.live


class _SimulatedReducer:
    """Does what `Reducer` does with its buffers.

    queue: the buckets in the order of their reduction.
    """

    def __init__(self, queue: Sequence[SimulatedBucket], rules: ReducerRules) -> None:
        self.queue = queue
        self.rules = rules
        self.memory = _Memory(None if rules.keeps else 2 * IN_FLIGHT)
        self._bucket_of = {p: b for b in queue for p in b.params}
        # Buckets with a buffer of local gradients.
        self._local: set[SimulatedBucket] = set()
        # Buckets whose shard has reduced gradients.
        self._shards: set[SimulatedBucket] = set()
        # Buckets in reduction, the oldest first.
        self._in_flight: deque[SimulatedBucket] = deque()
        # Parameters whose gradient is in ``param.grad``.
        self._waiting: set[nn.Parameter] = set()

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
        if not self.rules.keeps:
            self.memory.clear()

    def _arrive(self, param: nn.Parameter) -> None:
        """A gradient comes, into its bucket or ``param.grad``."""
        if self.rules.eager:
            self._copy_in(self._bucket_of[param])
        elif param not in self._waiting:
            self._waiting.add(param)
            self.memory.add(param.numel() * param.element_size())

    def _copy_in(self, bucket: SimulatedBucket) -> None:
        """Give the bucket a buffer, if it has none; older reductions end first where they are many."""
        if bucket in self._local:
            return
        while not self.rules.keeps and crowded(self._sent_bytes(b) for b in self._in_flight):
            self._complete(self._in_flight.popleft())
        self.memory.take(bucket.layout.total, self.rules.grad(bucket))
        self._local.add(bucket)

    def _sent_bytes(self, bucket: SimulatedBucket) -> int:
        """Bytes of the buffer that a bucket is reduced in."""
        return bucket.layout.total * self.rules.sent(bucket).itemsize

    def _launch(self, bucket: SimulatedBucket) -> None:
        """Start a reduction."""
        rules = self.rules
        memory = self.memory
        self._copy_in(bucket)
        self._local.discard(bucket)
        for param in self._waiting.intersection(bucket.params):
            self._waiting.discard(param)
            memory.live -= param.numel() * param.element_size()
        # The copy in the dtype of the message takes the place of the gradients.
        sent = rules.sent(bucket)
        if sent != rules.grad(bucket):
            memory.take(bucket.layout.total, sent)
            memory.give(bucket.layout.total, rules.grad(bucket))
        if rules.separate_shard:
            memory.take(bucket.layout.shard_numel, sent)
        self._in_flight.append(bucket)
        if not rules.overlap:
            self._drain()

    def _drain(self) -> None:
        """End all reductions."""
        while self._in_flight:
            self._complete(self._in_flight.popleft())

    def _complete(self, bucket: SimulatedBucket) -> None:
        """End a reduction: its result becomes the shard, or is added to it."""
        rules = self.rules
        memory = self.memory
        shard = bucket.layout.shard_numel
        total = bucket.layout.total
        grad = rules.grad(bucket)
        sent = rules.sent(bucket)
        first = bucket not in self._shards and not rules.to_host
        self._shards.add(bucket)
        # The first result is kept where it is, if that is no larger than a shard or is kept anyway.
        if first and sent == grad and (rules.separate_shard or rules.keeps or rules.world == 1):
            if rules.separate_shard:
                memory.give(total, sent)
            return
        if first:
            memory.take(shard, grad)
        memory.give(total, sent)
        if rules.separate_shard:
            memory.give(shard, sent)
