"""From an order of samples to the micro-batches of whole optimizer steps, for all ranks together.

A step is planned from the order, the number of micro-batches in it and the lengths of samples;
ranks then take their parts. So a step has the same samples on any number of ranks, as long as they
make equally many micro-batches together.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from ds_data_sampling.batching.order import Order

Item = Any
"""An index of the dataset, or a list of them that are packed into one row."""
Plan = list[list[Item]]
"""The micro-batches of one optimizer step: first those that ranks work on first, one for each, then
the next.
"""

Length = Callable[[int], int]
"""Tokens of the sample of an index."""

# samples that are taken from an order at once, where it is not known how many are needed
CHUNK = 32


@dataclass(frozen=True)
class TokenBudget:
    """What a micro-batch may hold.

    tokens: samples times the longest of them. samples: the fewest and the most.
    """

    tokens: int
    min_samples: int = 1
    max_samples: int | None = None

    def fits(self, length: int) -> bool:
        """Whether micro-batches with a sample of `length` are possible at all."""
        return length * self.min_samples <= self.tokens

    def size(self, longest: int) -> int:
        """Most samples beside one of length `longest`, itself included."""
        room = self.tokens // max(longest, 1)
        return room if self.max_samples is None else min(room, self.max_samples)


class Feed:
    """Samples in order. Those that a step has taken and not used come first in the next.

    usable: whether a sample can be used at all; the others are passed over.
    again: the same order once more, at the start of the epoch: what fills up the last step; None:
        an incomplete step is left out.
    """

    def __init__(
        self,
        order: Order,
        pending: Iterable[int] = (),
        usable: Callable[[int], bool] | None = None,
        again: Callable[[], Order] | None = None,
    ) -> None:
        self.order = order
        self.pending = deque(pending)
        self._usable = usable
        self._again = again
        self._filler: Order | None = None

    @property
    def drops_last(self) -> bool:
        """Whether a step that cannot be filled is left out."""
        return self._again is None

    def more(self, step: int) -> bool:
        """Whether there is a sample for `step`."""
        if not self.pending:
            self._read(1, step)
        return bool(self.pending)

    def take(self, count: int, step: int) -> list[int]:
        """The next `count` samples, for the optimizer step `step`; fewer where the epoch ends."""
        while len(self.pending) < count and self._read(count - len(self.pending), step):
            pass
        return [self.pending.popleft() for _ in range(min(count, len(self.pending)))]

    def take_one(self, step: int) -> int | None:
        """The next sample; None where the epoch ends."""
        if not self.pending:
            self._read(CHUNK, step)
        return self.pending.popleft() if self.pending else None

    def give_back(self, samples: Sequence[int]) -> None:
        """`samples`, in the order in which they were taken, are the next ones."""
        self.pending.extendleft(reversed(samples))

    def repeats(self, count: int, step: int) -> list[int]:
        """`count` samples from the beginning of the epoch; none where an incomplete step is left
        out.
        """
        found: list[int] = []
        while self._again is not None and len(found) < count:
            # An epoch may be shorter than what is missing: it is begun again, but not where a whole
            # pass gave nothing.
            fresh = self._filler is None
            self._filler = self._filler or self._again()
            more = self._filler.take(count - len(found), step)
            if not more and fresh:
                break
            found += self._only_usable(more)
            self._filler = self._filler if more else None
        return found

    def _only_usable(self, samples: list[int]) -> list[int]:
        return (
            samples if self._usable is None else [index for index in samples if self._usable(index)]
        )

    def _read(self, count: int, step: int) -> bool:
        """Have more samples pending; whether there may be still more."""
        # A curriculum may admit nothing that is usable in one read; the epoch ends where the order
        # does.
        while more := self.order.take(count, step):
            found = self._only_usable(more)
            self.pending.extend(found)
            if found:
                return True
        return False


def samples_in(items: Iterable[Item]) -> list[int]:
    """The indices in a micro-batch, row by row where they are packed."""
    return [index for item in items for index in (item if isinstance(item, list) else [item])]


# -- so many samples -------------------------------------------------------------------------------


def fixed(feed: Feed, step: int, micros: int, size: int) -> list[Plan]:
    """A step of `micros` micro-batches of `size` samples.

    The last of an epoch is filled up from its beginning.
    """
    wanted = micros * size
    taken = feed.take(wanted, step)
    if len(taken) < wanted:
        taken += feed.repeats(wanted - len(taken), step)
    if len(taken) < wanted:
        return []
    return [[taken[first : first + size] for first in range(0, wanted, size)]]


# -- so many tokens --------------------------------------------------------------------------------


def by_tokens(
    feed: Feed, step: int, micros: int, length: Length, budget: TokenBudget
) -> list[Plan]:
    """A step of `micros` micro-batches that are filled one after the other, in the order of the
    samples.

    The last step of an epoch has what is left, in equally many micro-batches.
    """
    plan: list[list[int]] = []
    current: list[int] = []
    longest = 0
    while (index := feed.take_one(step)) is not None:
        tokens = length(index)
        # This sample would make the micro-batch too large: it begins the next one.
        if current and len(current) >= budget.size(max(longest, tokens)):
            plan.append(current)
            current = []
            longest = 0
            # The step is full, and the sample that did not fit is the first of the next.
            if len(plan) == micros:
                feed.give_back([index])
                return [plan]
        current.append(index)
        longest = max(longest, tokens)
    last = _last([*plan, current] if current else plan, micros, feed, step)
    return [last] if last else []


def by_length(
    feed: Feed,
    step: int,
    micros: int,
    length: Length,
    budget: TokenBudget,
    *,
    steps: int = 1,
    seed: int = 0,
) -> list[Plan]:
    """`steps` steps at once: samples of similar length share a micro-batch, and similar
    micro-batches a step.

    The steps come in random order, by `seed` and the first sample. Fewer where the epoch ends.
    """
    samples, ended = _enough(feed, step, micros * steps, length, budget)
    # stable: equal lengths stay in order
    chosen = sorted(samples, key=lambda index: -length(index))
    # From the longest to the shortest: a micro-batch is as large as its first sample allows.
    groups: Plan = []
    while chosen:
        size = budget.size(length(chosen[0]))
        groups.append(chosen[:size])
        chosen = chosen[size:]
    _even_out(groups, budget.min_samples)
    # The last step of the epoch: left out, or made of smaller micro-batches.
    if ended and len(groups) % micros:
        whole = len(groups) // micros * micros
        groups = (
            groups[:whole] if feed.drops_last else _last(groups, whole + micros, feed, step) or []
        )
    plans = [groups[first : first + micros] for first in range(0, len(groups), micros)]
    # The first sample tells windows apart; a resumed run gets the same order.
    generator = torch.Generator().manual_seed(seed + samples[0])
    return [plans[place] for place in torch.randperm(len(plans), generator=generator).tolist()]


def _enough(
    feed: Feed, step: int, groups: int, length: Length, budget: TokenBudget
) -> tuple[list[int], bool]:
    """As many of the next samples as make `groups` micro-batches, and whether the epoch ends with
    them.
    """
    samples: list[int] = []
    wanted = groups
    while True:
        more = feed.take(wanted, step)
        samples += more
        if len(more) < wanted and _count(samples, length, budget) <= groups:
            return samples, True
        if _count(samples, length, budget) > groups:
            break
        # Twice as many as before, until they are too many.
        wanted = len(samples)
    # the largest part of them that makes no more than `groups`
    fit = 0
    too_many = len(samples)
    while too_many - fit > 1:
        middle = (fit + too_many) // 2
        if _count(samples[:middle], length, budget) <= groups:
            fit = middle
        else:
            too_many = middle
    feed.give_back(samples[fit:])
    return samples[:fit], False


def _count(samples: Sequence[int], length: Length, budget: TokenBudget) -> int:
    """Micro-batches that `samples` make, sorted by length."""
    falling = np.sort(np.asarray([length(index) for index in samples]))[::-1]
    groups = place = 0
    while place < len(falling):
        place += budget.size(int(falling[place]))
        groups += 1
    return groups


def _even_out(groups: Plan, fewest: int) -> None:
    """The last micro-batch has what was left; where that is too little, it shares with the one
    before.
    """
    if len(groups) > 1 and len(groups[-1]) < fewest:
        both = groups[-2] + groups[-1]
        groups[-2:] = [both[: -(len(both) // 2)], both[-(len(both) // 2) :]]


def _last(groups: Plan, count: int, feed: Feed, step: int) -> Plan | None:
    """`count` groups from the samples in `groups`, of which there are fewer.

    None: there is no such step.
    """
    if len(groups) == count or not groups:
        return groups or None
    if feed.drops_last:
        return None
    while len(groups) < count:
        place = max(range(len(groups)), key=lambda g: len(groups[g]))
        # The largest group is halved, until all have one sample; then samples of the epoch's
        # beginning come in.
        if (half := len(groups[place]) // 2) == 0:
            groups += [[index] for index in feed.repeats(count - len(groups), step)]
            break
        groups[place : place + 1] = [groups[place][:-half], groups[place][-half:]]
    return groups


# -- several samples in a row ----------------------------------------------------------------------


def packed(
    feed: Feed, step: int, micros: int, rows: int, capacity: int, length: Length
) -> list[Plan]:
    """A step of `micros` micro-batches of `rows` rows, which are lists of samples of at most
    `capacity` tokens.

    Best fit, in the order of the samples: each goes where it leaves least room. Those that find
    none are the first of the next step. The last step of an epoch has what is left, in equally many
    rows.
    """
    count = micros * rows
    contents: list[list[int]] = [[] for _ in range(count)]
    room = [(capacity, row) for row in range(count)]  # ascending; full rows are not in it
    later: list[int] = []
    while room and len(later) < max(CHUNK, count) and (index := feed.take_one(step)) is not None:
        tokens = length(index)
        place = bisect_left(room, (tokens, -1))
        if place == len(room):
            later.append(index)
            continue
        left, row = room.pop(place)
        contents[row].append(index)
        if left > tokens:
            insort(room, (left - tokens, row))
    feed.give_back(later)
    filled = _last([row for row in contents if row], count, feed, step)
    return [[filled[first : first + rows] for first in range(0, count, rows)]] if filled else []
