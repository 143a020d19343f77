"""How tensors lie in one flat buffer that is cut into equal parts, one per rank: arithmetic only, no tensors.

A buffer holds its tensors one after the other and ends with padding, so that it can be reduce-scattered and
all-gathered as it is. Part r is rank r's; where tensors begin plays no role for the cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

__all__ = ["ALIGN", "Layout", "Span", "arrange", "pack"]


class _Sized(Protocol):
    def numel(self) -> int: ...


K = TypeVar("K", bound=Hashable)
T = TypeVar("T", bound=_Sized)

ALIGN = 2
"""Each part is a multiple of this many elements, so that parts of 16-bit elements begin at whole words."""


class Span(NamedTuple):
    """The elements [start, stop) of a flattened tensor, which lie at `at` in their part; start == stop: none."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True)
class Layout:
    """`sizes` elements one after the other, cut over `world` ranks.

    offsets: where each tensor begins. part: elements per rank. total: elements with padding, ``part * world``.
    """

    sizes: tuple[int, ...]
    world: int
    offsets: tuple[int, ...]
    part: int

    @property
    def total(self) -> int:
        """Elements of the buffer, padding included."""
        return self.part * self.world

    @classmethod
    def of(cls, sizes: Iterable[int], world: int) -> Layout:
        """The layout of tensors of `sizes` elements over `world` ranks."""
        sizes = tuple(sizes)
        offsets = (0, *itertools.accumulate(sizes))
        rows = -(-offsets[-1] // (world * ALIGN))
        return cls(sizes, world, offsets[:-1], rows * ALIGN if world > 1 else offsets[-1])

    def span(self, index: int, rank: int) -> Span:
        """What of tensor `index` lies in part `rank`."""
        begin, low = self.offsets[index], rank * self.part
        start = min(max(low - begin, 0), self.sizes[index])
        stop = max(min(low + self.part - begin, self.sizes[index]), start)
        return Span(start, stop, begin + start - low if stop > start else 0)

    def ranks(self, index: int) -> range:
        """The ranks whose parts hold elements of tensor `index`."""
        begin, size = self.offsets[index], self.sizes[index]
        return range(begin // self.part, (begin + size - 1) // self.part + 1) if size else range(0)


def pack(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Cut ``range(len(sizes))`` into runs of at most `capacity` elements; a larger tensor is a run of its own."""
    runs: list[list[int]] = []
    filled = 0
    for index, size in enumerate(sizes):
        if not runs or filled + size > capacity:
            runs.append([])
            filled = 0
        runs[-1].append(index)
        filled += size
    return runs


def arrange(params: Sequence[T], kind: Callable[[T], K], capacity: Callable[[K], int]) -> list[list[T]]:
    """Which parameters share a buffer: runs of one kind, in reverse order, about that in which backward finishes them.

    kind: what must be the same in a buffer. capacity: kind -> the most elements of a buffer.
    """
    kinds: dict[K, list[T]] = {}
    for param in reversed(params):
        kinds.setdefault(kind(param), []).append(param)
    return [
        [members[i] for i in run]
        for key, members in kinds.items()
        for run in pack([p.numel() for p in members], capacity(key))
    ]
