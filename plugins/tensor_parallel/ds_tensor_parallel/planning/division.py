"""Where a length is cut: one range of every fused matrix for each rank (torch-free)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Division:
    """A length that is cut over ranks.

    Units go to ranks as evenly as possible, the first ranks have one more; the last unit may be
    shorter.
    """

    segments: tuple[int, ...]
    """The lengths of the matrices that are fused along it; each is cut by itself, so that every
    rank has matching parts."""
    units: tuple[int, ...]
    """Each segment is cut at multiples of its unit."""
    ranks: int

    @classmethod
    def by_unit(cls, segments: Sequence[int], unit: int, ranks: int) -> Division:
        """Cut at multiples of `unit`."""
        return cls(tuple(segments), (unit,) * len(segments), ranks)

    @classmethod
    def by_count(cls, segments: Sequence[int], count: int, ranks: int) -> Division:
        """Cut each of `segments` into `count` equal units, such as heads; ValueError where it does
        not divide.
        """
        if wrong := [n for n in segments if n % count]:
            raise ValueError(f"a length of {wrong[0]} does not divide into {count} heads")
        return cls(tuple(segments), tuple(n // count for n in segments), ranks)

    @property
    def length(self) -> int:
        """The whole."""
        return sum(self.segments)

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """(first, size) of the rank's part of each segment, as indices of the whole."""
        found = []
        start = 0
        for length, unit in zip(self.segments, self.units, strict=True):
            low, high = (
                min(length, unit * self._before(length, unit, r)) for r in (rank, rank + 1)
            )
            found.append((start + low, high - low))
            start += length
        return found

    def _before(self, length: int, unit: int, rank: int) -> int:
        """Units of the ranks before `rank`."""
        # Rounded up: a shorter last unit counts as one.
        share, more = divmod(-(-length // unit), self.ranks)
        return rank * share + min(rank, more)

    def size(self, rank: int) -> int:
        """The length of the rank's part."""
        return sum(size for _, size in self.ranges(rank))

    def sizes(self) -> list[int]:
        """The lengths of all ranks' parts."""
        return [self.size(rank) for rank in range(self.ranks)]

    @property
    def even(self) -> bool:
        """Whether all ranks' parts are equally long."""
        return len(set(self.sizes())) == 1

    def order(self) -> list[tuple[int, int]] | None:
        """Where the pieces of the whole are in the ranks' parts one after the other: (first, size),
        in order.

        None where they are in order already.
        """
        if len(self.segments) == 1:
            return None
        # Where each rank's part begins; in it the segments follow each other.
        firsts = list(itertools.accumulate(self.sizes(), initial=0))
        parts: list[list[tuple[int, int]]] = [[] for _ in self.segments]
        for rank in range(self.ranks):
            first = firsts[rank]
            for segment, (_, size) in enumerate(self.ranges(rank)):
                parts[segment].append((first, size))
                first += size
        return [piece for segment in parts for piece in segment]
