"""What the checksums of three passes prove: which pass of which rank is wrong, and where first."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ds_numerics.trace import Checksums, Key, Kind, differing

Label = tuple[Kind, str]
"""What keys of several micro-batches have in common."""


class Odd(Enum):
    """Which of three passes differs from the two others; the value is how a message says it."""

    FIRST = "its first pass differs from two replays"
    REPLAY = "one of two replays differs from its first pass and the other"
    ALL = "its passes agree in nothing else: all three differ"
    WEIGHT = "it changed between the step's first forward and the update"


@dataclass(frozen=True, slots=True)
class Finding:
    """Where a rank's passes differ first."""

    rank: int
    odd: Odd
    order: int
    """Its place in the order of computation, which is the same on all ranks; -1 for a weight."""
    what: str
    micro: int
    """The micro-batch; -1 for what belongs to the whole step."""
    more: int
    """How many other checksums differ on that rank."""

    def as_json(self) -> list[Any]:
        """What JSON can hold."""
        return [self.rank, self.odd.name, self.order, self.what, self.micro, self.more]

    @staticmethod
    def from_json(row: Sequence[Any]) -> Finding:
        """The reverse of `as_json`."""
        rank, odd, *rest = row
        return Finding(rank, Odd[odd], *rest)

    def __str__(self) -> str:
        micro = f" in micro-batch {self.micro}" if self.micro >= 0 else ""
        more = f", and {self.more} more checksums with it" if self.more else ""
        return f"rank {self.rank}: {self.what}{micro}: {self.odd.value}{more}"


def find(rank: int, passes: Sequence[Checksums], known: Collection[Label]) -> Finding | None:
    """Where this rank's three passes differ first; None where they do not.

    known: what differs by design, and is not compared.
    """
    keys = differing_keys(passes, known)
    if not keys:
        return None
    first, second, third = (checksums.by_key for checksums in passes)
    order = {key: place for place, key in enumerate(first)}
    key = min(keys, key=lambda k: order.get(k, len(order)))
    odds = {_odd(first.get(k), second.get(k), third.get(k)) for k in keys}
    odd = odds.pop() if len(odds) == 1 else Odd.ALL
    return Finding(rank, odd, order.get(key, len(order)), key.what, key.micro, len(keys) - 1)


def differing_keys(passes: Sequence[Checksums], known: Collection[Label]) -> set[Key]:
    """The keys in which any pass differs from the first."""
    first, *others = passes
    found = {key for other in others for key in differing(first, other)}
    return {key for key in found if (key.kind, key.name) not in known}


def find_weight(rank: int, before: Checksums, after: Checksums) -> Finding | None:
    """The first weight in memory that has changed within the step."""
    changed = list(differing(before, after))
    if not changed:
        return None
    return Finding(rank, Odd.WEIGHT, -1, changed[0].what, -1, len(changed) - 1)


def _odd(first: int | None, second: int | None, third: int | None) -> Odd:
    if second == third:
        return Odd.FIRST
    return Odd.REPLAY if first in (second, third) else Odd.ALL


def describe(step: int, findings: Sequence[Finding]) -> str:
    """What was found on all ranks, the origin first: who differs earliest in the step."""
    origin = min(f.order for f in findings)
    first = [str(f) for f in findings if f.order == origin]
    later = sorted({f.rank for f in findings if f.order != origin})
    text = f"step {step}: a bit has flipped. " + "; ".join(first)
    if later:
        text += f" (what follows from it differs on {ranks_text(later)} too)"
    return text


def ranks_text(ranks: Sequence[int]) -> str:
    """Rank numbers in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
