"""A simulated step without tensors: what stage 3 would gather, and which flat gradient buffers
there would be.

Gathers are decided by the code that trains (`GatherScheduler`, over units that only count). Modules
are assumed to run in the order in which the model registers them, and gradients to arrive in the
reverse order of the parameters.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ds_zero.buckets.layout import Layout
from ds_zero.gather.scheduler import GatherScheduler
from ds_zero.gather.unit import GatherUnit
from ds_zero.reduce.reducer import IN_FLIGHT, crowded

if TYPE_CHECKING:
    from ds_zero.comm.collectives import WeightGather
    from ds_zero.config import ZeroConfig
    from ds_zero.gather.grouping import Gatherer


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedBucket:
    """Sizes of a `FlatBucket`. replicated: not sharded at rest. trained: an optimizer updates
    it."""

    params: tuple[nn.Parameter, ...]
    layout: Layout
    dtype: torch.dtype
    replicated: bool
    trained: bool

    @property
    def names(self) -> list[str]:
        """Shapes of the parameters, in the place of names in messages."""
        return [str(tuple(p.shape)) for p in self.params]


class SimulatedUnit(GatherUnit):
    """A unit that counts how often it would be gathered."""

    def __init__(self, index: int, bucket: SimulatedBucket, leaf: bool) -> None:
        super().__init__(index, bucket.layout.total, leaf, bucket.names[0])
        self.bucket = bucket
        self.gathers = 0

    def _begin(self, wire: WeightGather) -> None:
        self.gathers += 1

    def _finish(self) -> None:
        """Nothing to wait for."""

    def _free(self) -> None:
        """Nothing to free."""


def gather_passes(
    modules: Sequence[Gatherer], units: Sequence[SimulatedUnit], section: ZeroConfig
) -> int:
    """Simulate forwards and backwards until they repeat; return the most elements gathered at a
    time.

    Afterwards each unit's `gathers` and `first_use` are those of one forward and backward.
    """
    gathering = GatherScheduler(section, units)
    simulated = _SimulatedModules(modules, units, gathering)
    for _ in range(2):  # the second one knows the order
        for unit in units:
            unit.gathers = 0
        gathering.in_backward = False
        gathering.open()
        simulated.forward()
        gathering.close()
        gathering.in_backward = True
        simulated.backward()
        gathering.end_pass()
    return gathering.peak


class _SimulatedModules:
    """Does what `GatherHooks` does when modules run."""

    def __init__(
        self,
        modules: Sequence[Gatherer],
        units: Sequence[SimulatedUnit],
        gathering: GatherScheduler,
    ) -> None:
        self._gathering = gathering
        unit_of = {p: u for u in units for p in u.bucket.params}
        self._units = {g.name: list(dict.fromkeys(unit_of[p] for p in g.params)) for g in modules}
        self._leaf = {g.name: g.leaf for g in modules}
        self._trains = {
            g.name: any(p.requires_grad for p in g.module.parameters()) for g in modules
        }
        self._below: dict[str, list[str]] = {}
        for gatherer in modules:
            if gatherer.name:
                self._below.setdefault(gatherer.name.rpartition(".")[0], []).append(gatherer.name)
        self._flowing = False  # whether what goes into the next module requires a gradient
        self._flows: dict[str, tuple[bool, bool]] = {}  # per module the same, before and after it
        self._uses: Counter[SimulatedUnit] = Counter()

    def forward(self, name: str = "") -> None:
        if not name:
            self._flowing = False
            self._uses.clear()
        before = self._flowing
        units = self._units.get(name, ())
        for unit in units:
            unit.uses.forward += 1
            self._gathering.fetch(unit)
        for child in self._below.get(name, ()):
            self.forward(child)
        self._flowing |= self._trains.get(name, False)
        self._flows[name] = before, self._flowing
        for unit in units:
            unit.uses.forward -= 1
            self._uses[unit] += self._flowing
            self._gathering.drop(unit)

    def backward(self, name: str = "") -> None:
        before, after = self._flows[name]
        if not after:
            return
        units = self._units.get(name, ())
        for unit in units:
            unit.uses.backward = True
            self._gathering.fetch(unit)
        for child in reversed(self._below.get(name, ())):
            self.backward(child)
        for unit in units:
            self._uses[unit] -= 1
            by_gradients = not self._leaf[name] and all(p.requires_grad for p in unit.bucket.params)
            if self._uses[unit] == 0 if by_gradients else before:
                unit.uses.backward = False
                self._gathering.drop(unit)


# -- gradients -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wires:
    """What decides the buffers of a reducer.

    keeps: buffers are kept between steps. eager: gradients go into buckets at once. to_host:
    reduced gradients are on the host. grad, wire: the dtypes in which a bucket's gradients
    accumulate and are sent.
    """

    world: int
    keeps: bool
    overlap: bool
    eager: bool
    scatter: bool
    to_host: bool
    grad: Callable[[SimulatedBucket], torch.dtype]
    wire: Callable[[SimulatedBucket], torch.dtype]


class _Memory:
    """Counts the bytes that the reducer's buffer pool would hold, in use or free."""

    def __init__(self, most: int | None) -> None:
        self._free: list[tuple[int, torch.dtype]] = []
        self._most = most
        self.live = self.peak = 0

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
    wires: Wires,
    passes: int,
    waits: bool,
) -> tuple[int, int]:
    """The bytes of flat gradient buffers: the most at a time, and those between backward and step.

    queue: buckets in the order in which they are reduced. arrivals: their parameters in the order
    in which gradients arrive. passes: backwards per step that reduce. waits: whether backwards
    without reduction come before them.
    """
    reducer = _SimulatedReducer(queue, wires)
    if waits:
        reducer.collect(arrivals)
    for _ in range(min(passes, 2)):  # the second one adds to what there is; so do all others
        reducer.backward(arrivals)
    return reducer.memory.peak, reducer.memory.live


class _SimulatedReducer:
    """Does what `Reducer` does with its buffers."""

    def __init__(self, queue: Sequence[SimulatedBucket], wires: Wires) -> None:
        self.queue = queue
        self.wires = wires
        self.memory = _Memory(None if wires.keeps else 2 * IN_FLIGHT)
        self._bucket_of = {p: b for b in queue for p in b.params}
        self._local: set[SimulatedBucket] = set()
        self._parts: set[SimulatedBucket] = set()
        self._in_flight: deque[SimulatedBucket] = deque()
        self._waiting: set[nn.Parameter] = set()  # in param.grad

    def collect(self, arrivals: Sequence[nn.Parameter]) -> None:
        """Gradients arrive, and none is reduced."""
        for param in arrivals:
            self._take(param)

    def _take(self, param: nn.Parameter) -> None:
        if self.wires.eager:
            self._copy_in(self._bucket_of[param])
        elif param not in self._waiting:
            self._waiting.add(param)
            self.memory.add(param.numel() * param.element_size())

    def backward(self, arrivals: Sequence[nn.Parameter]) -> None:
        arrived: Counter[SimulatedBucket] = Counter()
        upcoming = 0
        for param in arrivals:
            bucket = self._bucket_of[param]
            self._take(param)
            arrived[bucket] += 1
            while upcoming < len(self.queue) and arrived[self.queue[upcoming]] == len(
                self.queue[upcoming].params
            ):
                self._launch(self.queue[upcoming])
                upcoming += 1
        self._drain(0)
        if not self.wires.keeps:
            self.memory.clear()

    def _copy_in(self, bucket: SimulatedBucket) -> None:
        if bucket not in self._local:
            while not self.wires.keeps and crowded(self._sent(b) for b in self._in_flight):
                self._complete(self._in_flight.popleft())
            self.memory.take(bucket.layout.total, self.wires.grad(bucket))
            self._local.add(bucket)

    def _sent(self, bucket: SimulatedBucket) -> int:
        """Bytes of the buffer that a bucket is reduced in."""
        wires = self.wires
        dtype = wires.wire(bucket) if wires.world > 1 else wires.grad(bucket)
        return bucket.layout.total * dtype.itemsize

    def _launch(self, bucket: SimulatedBucket) -> None:
        wires = self.wires
        memory = self.memory
        self._copy_in(bucket)
        self._local.discard(bucket)
        for param in self._waiting.intersection(bucket.params):
            self._waiting.discard(param)
            memory.live -= param.numel() * param.element_size()
        wire = wires.wire(bucket)
        total = bucket.layout.total
        if wires.world > 1:
            if wire != wires.grad(bucket):
                memory.take(total, wire)
                memory.give(total, wires.grad(bucket))
            if wires.scatter and not wires.keeps:
                memory.take(bucket.layout.shard_numel, wire)
        self._in_flight.append(bucket)
        if not wires.overlap:
            self._drain(0)

    def _drain(self, left: int) -> None:
        while len(self._in_flight) > left:
            self._complete(self._in_flight.popleft())

    def _complete(self, bucket: SimulatedBucket) -> None:
        wires = self.wires
        memory = self.memory
        part = bucket.layout.shard_numel
        total = bucket.layout.total
        grad = wires.grad(bucket)
        wire = wires.wire(bucket) if wires.world > 1 else grad
        # the shard is in a separate buffer
        own = wires.scatter and not wires.keeps and wires.world > 1
        first = bucket not in self._parts and not wires.to_host
        self._parts.add(bucket)
        if first and wire == grad and (own or wires.keeps or wires.world == 1):
            if own:
                memory.give(total, wire)
            return
        if first:
            memory.take(part, grad)
        memory.give(total, wire)
        if own:
            memory.give(part, wire)
