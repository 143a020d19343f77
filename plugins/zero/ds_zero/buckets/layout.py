"""Layout of tensors in one flat buffer that is cut into equal shards, one per rank: arithmetic
only, no tensors.

A buffer holds its tensors one after the other and ends with padding, so that it can be
reduce-scattered and all-gathered as it is. Shard r is rank r's; a tensor may be cut at any element.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

ALIGN = 2
"""Each shard is a multiple of this many elements, so that shards of 16-bit elements begin at full
words.
"""


class Span(NamedTuple):
    """The elements [start, stop) of a flattened tensor, at offset `at` of their shard; start ==
    stop: none.
    """

    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        """How many these are."""
        return self.stop - self.start

    @property
    def within(self) -> slice:
        """These elements as a range of the shard."""
        return slice(self.at, self.at + self.numel)


@dataclass(frozen=True, slots=True)
class Layout:
    """`sizes` elements one after the other, cut over `world` ranks.

    offsets: where each tensor begins.
    shard_numel: elements per rank, padding included.
    """

    sizes: tuple[int, ...]
    world: int
    offsets: tuple[int, ...]
    shard_numel: int

    @property
    def total(self) -> int:
        """Elements of the buffer, padding included."""
        return self.shard_numel * self.world

    @classmethod
    def of(cls, sizes: Iterable[int], world: int) -> Layout:
        """The layout of tensors of `sizes` elements over `world` ranks."""
        sizes = tuple(sizes)
        offsets = (0, *itertools.accumulate(sizes))
        rows = -(-offsets[-1] // (world * ALIGN))
        return cls(sizes, world, offsets[:-1], rows * ALIGN if world > 1 else offsets[-1])

    def span(self, index: int, rank: int) -> Span:
        """The elements of tensor `index` in the shard of `rank`."""
        begin = self.offsets[index]
        low = rank * self.shard_numel
        start = min(max(low - begin, 0), self.sizes[index])
        stop = max(min(low + self.shard_numel - begin, self.sizes[index]), start)
        return Span(start, stop, begin + start - low if stop > start else 0)

    def ranks(self, index: int) -> range:
        """The ranks whose shards have elements of tensor `index`."""
        begin = self.offsets[index]
        size = self.sizes[index]
        if not size:
            return range(0)
        return range(begin // self.shard_numel, (begin + size - 1) // self.shard_numel + 1)
