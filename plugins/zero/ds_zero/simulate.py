"""A step without tensors: what stage 3 would gather, and the flat buffers gradients would go through.

Gathers are decided by the very code that trains (`Gathering`, over units that only count). Modules are taken to run in
the order in which the model registers them, and gradients to arrive in the reverse order of the parameters.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_zero.gather import Gathering, State, Unit
from ds_zero.grads import IN_FLIGHT
from ds_zero.layout import Layout

if TYPE_CHECKING:
    from ds_zero.config import ZeroConfig
    from ds_zero.units import Gatherer

__all__ = ["DryBucket", "DryUnit", "Wires", "gather_passes", "reduction"]


@dataclass(frozen=True, slots=True, eq=False)
class DryBucket:
    """What a `FlatBucket` would hold. whole: its weights are on every rank. trained: an optimizer updates it."""

    params: tuple[nn.Parameter, ...]
    layout: Layout
    dtype: torch.dtype
    whole: bool
    trained: bool

    @property
    def names(self) -> list[str]:
        """For messages; units are counted, not named, here."""
        return [str(tuple(p.shape)) for p in self.params]


class DryUnit(Unit):
    """A unit that counts how often it would be gathered."""

    def __init__(self, index: int, bucket: DryBucket, leaf: bool) -> None:  # no tensors, so not the parent's
        self.index, self.leaf, self.dry = index, leaf, bucket
        self.bucket: Any = bucket
        self.size = bucket.layout.total
        self.state = State.RELEASED
        self.holders = self.kept = self.gathers = 0
        self.wanted = self.pinned = False
        self.arrived = set()
        self.first_use = -1

    def start(self, *, by_all_reduce: bool, dtype: torch.dtype | None = None) -> None:
        """See `Unit.start`."""
        self.gathers += 1
        self.state = State.GATHERING

    def complete(self) -> None:
        """See `Unit.complete`."""
        self.state = State.WHOLE

    def release(self) -> None:
        """See `Unit.release`."""
        self.state, self.wanted, self.pinned = State.RELEASED, False, False


def gather_passes(modules: Sequence[Gatherer], units: Sequence[DryUnit], section: ZeroConfig) -> int:
    """Run forwards and backwards until they repeat; the most elements gathered at a time.

    Afterwards each unit's `gathers` and `first_use` are those of one forward and backward.
    """
    gathering = Gathering(section, units)
    dry = _DryModules(modules, units, gathering)
    for _ in range(2):  # the second one knows the order
        for unit in units:
            unit.gathers = 0
        gathering.in_backward = False
        gathering.open()
        dry.forward()
        gathering.close()
        gathering.in_backward = True
        dry.backward()
        gathering.end_pass()
    return gathering.peak


class _DryModules:
    """Does what `Watch` does when modules run."""

    def __init__(self, modules: Sequence[Gatherer], units: Sequence[DryUnit], gathering: Gathering) -> None:
        self._gathering = gathering
        unit_of = {p: u for u in units for p in u.dry.params}
        self._units = {g.name: list(dict.fromkeys(unit_of[p] for p in g.params)) for g in modules}
        self._leaf = {g.name: g.leaf for g in modules}
        self._trains = {g.name: any(p.requires_grad for p in g.module.parameters()) for g in modules}
        self._below: dict[str, list[str]] = {}
        for gatherer in modules:
            if gatherer.name:
                self._below.setdefault(gatherer.name.rpartition(".")[0], []).append(gatherer.name)
        self._flowing = False  # whether what goes into the next module requires a gradient
        self._flows: dict[str, tuple[bool, bool]] = {}  # per module the same, before and after it
        self._uses: Counter[DryUnit] = Counter()

    def forward(self, name: str = "") -> None:
        if not name:
            self._flowing = False
            self._uses.clear()
        before = self._flowing
        units = self._units.get(name, ())
        for unit in units:
            unit.holders += 1
            self._gathering.fetch(unit)
        for child in self._below.get(name, ()):
            self.forward(child)
        self._flowing |= self._trains.get(name, False)
        self._flows[name] = before, self._flowing
        for unit in units:
            unit.holders -= 1
            self._uses[unit] += self._flowing
            self._gathering.drop(unit)

    def backward(self, name: str = "") -> None:
        before, after = self._flows[name]
        if not after:
            return
        units = self._units.get(name, ())
        for unit in units:
            unit.wanted = True
            self._gathering.fetch(unit)
        for child in reversed(self._below.get(name, ())):
            self.backward(child)
        for unit in units:
            self._uses[unit] -= 1
            by_gradients = not self._leaf[name] and all(p.requires_grad for p in unit.dry.params)
            if self._uses[unit] == 0 if by_gradients else before:
                unit.wanted = False
                self._gathering.drop(unit)


# -- gradients ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wires:
    """What a reducer goes by: `grad`, `wire`: the dtypes in which a bucket's gradients accumulate and travel.

    eager: gradients go into buckets at once. away: reduced gradients leave the device.
    """

    world: int
    keeps: bool
    overlap: bool
    eager: bool
    scatter: bool
    away: bool
    grad: Callable[[DryBucket], torch.dtype]
    wire: Callable[[DryBucket], torch.dtype]


class _Memory:
    """Counts what `_Pool` would hold, in use or free, in bytes."""

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
    queue: Sequence[DryBucket], arrivals: Sequence[nn.Parameter], wires: Wires, passes: int, waits: bool
) -> tuple[int, int]:
    """The bytes that flat gradient buffers take: the most at a time, and between backward and step.

    queue: buckets in the order in which they travel. arrivals: their parameters, in the order in which gradients come.
    passes: backwards that reduce, before one step. waits: others come before, whose gradients stay with the rank.
    """
    reducer = _DryReducer(queue, wires)
    if waits:
        reducer.collect(arrivals)
    for _ in range(min(passes, 2)):  # the second one adds to what there is; so do all others
        reducer.backward(arrivals)
    return reducer.memory.peak, reducer.memory.live


class _DryReducer:
    """Does what `Reducer` does with its buffers."""

    def __init__(self, queue: Sequence[DryBucket], wires: Wires) -> None:
        self.queue, self.wires, self.memory = queue, wires, _Memory(None if wires.keeps else 2 * IN_FLIGHT)
        self._place = {p: b for b in queue for p in b.params}
        self._local: set[DryBucket] = set()
        self._parts: set[DryBucket] = set()
        self._travelling: deque[DryBucket] = deque()
        self._waiting: set[nn.Parameter] = set()  # in param.grad

    def collect(self, arrivals: Sequence[nn.Parameter]) -> None:
        """Gradients come, and none travels."""
        for param in arrivals:
            self._take(param)

    def _take(self, param: nn.Parameter) -> None:
        if self.wires.eager:
            self._absorb(self._place[param])
        elif param not in self._waiting:
            self._waiting.add(param)
            self.memory.add(param.numel() * param.element_size())

    def backward(self, arrivals: Sequence[nn.Parameter]) -> None:
        arrived: Counter[DryBucket] = Counter()
        upcoming = 0
        for param in arrivals:
            bucket = self._place[param]
            self._take(param)
            arrived[bucket] += 1
            while upcoming < len(self.queue) and arrived[self.queue[upcoming]] == len(self.queue[upcoming].params):
                self._launch(self.queue[upcoming])
                upcoming += 1
        self._drain(0)
        if not self.wires.keeps:
            self.memory.clear()

    def _absorb(self, bucket: DryBucket) -> None:
        if bucket not in self._local:
            if not self.wires.keeps:
                self._drain(IN_FLIGHT - 1)
            self.memory.take(bucket.layout.total, self.wires.grad(bucket))
            self._local.add(bucket)

    def _launch(self, bucket: DryBucket) -> None:
        wires, memory = self.wires, self.memory
        self._absorb(bucket)
        self._local.discard(bucket)
        for param in self._waiting.intersection(bucket.params):
            self._waiting.discard(param)
            memory.live -= param.numel() * param.element_size()
        wire, total = wires.wire(bucket), bucket.layout.total
        if wires.world > 1:
            if wire != wires.grad(bucket):
                memory.take(total, wire)
                memory.give(total, wires.grad(bucket))
            if wires.scatter and not wires.keeps:
                memory.take(bucket.layout.part, wire)
        self._travelling.append(bucket)
        if not wires.overlap:
            self._drain(0)

    def _drain(self, left: int) -> None:
        while len(self._travelling) > left:
            self._take_in(self._travelling.popleft())

    def _take_in(self, bucket: DryBucket) -> None:
        wires, memory, part = self.wires, self.memory, bucket.layout.part
        total, grad = bucket.layout.total, wires.grad(bucket)
        wire = wires.wire(bucket) if wires.world > 1 else grad
        own = wires.scatter and not wires.keeps and wires.world > 1  # the part came in a buffer of its own
        first = bucket not in self._parts and not wires.away
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
