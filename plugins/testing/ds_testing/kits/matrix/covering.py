"""Covering arrays: few rows that hold every pair (or triple) of values of features.

A row gives each feature one of its values. Pairs that are refused are in no row; what they are is
learned while rows run. The construction is greedy (AETG: Cohen, Dalal, Fredman, Patton, "The AETG
System", IEEE TSE 23(7), 1997), and the same for the same arguments.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

Choice = tuple[str, str]
"""A feature and one of its values."""

Combination = frozenset[Choice]
"""Choices of different features."""

Row = Mapping[str, str]
"""Feature -> its value."""

TRIES = 12
"""Rows that are made for each that is kept: the one that covers most."""


def combinations(features: Mapping[str, Sequence[str]], strength: int) -> set[Combination]:
    """Every choice of values of every `strength` features."""
    found = set()
    for chosen in itertools.combinations(features, strength):
        for values in itertools.product(*(features[name] for name in chosen)):
            found.add(frozenset(zip(chosen, values, strict=True)))
    return found


def held(row: Row, strength: int) -> Iterator[Combination]:
    """The combinations of `strength` choices that stand in `row`."""
    return map(frozenset, itertools.combinations(row.items(), strength))


class Rules:
    """Which choices may stand in one row."""

    def __init__(
        self,
        features: Mapping[str, Sequence[str]],
        refused: Iterable[Combination] = (),
        possible: Callable[[Row], bool] = lambda row: True,
    ) -> None:
        self.features = features
        self.refused = set(refused)
        self.possible = possible

    def allow(self, row: Row) -> bool:
        """Whether `row`, which may lack features, holds nothing refused and is possible."""
        choices = set(row.items())
        return not any(bad <= choices for bad in self.refused) and self.possible(row)

    def complete(self, row: Row) -> dict[str, str] | None:
        """`row` with the first allowed value of each feature that it lacks; None if there is none."""
        left = [name for name in self.features if name not in row]
        return self._filled(dict(row), left) if self.allow(row) else None

    def _filled(self, row: dict[str, str], left: Sequence[str]) -> dict[str, str] | None:
        if not left:
            return row
        name, *others = left
        for value in self.features[name]:
            longer = {**row, name: value}
            # A value may shut out all values of a later feature: then the next one is tried.
            if self.allow(longer) and (found := self._filled(longer, others)) is not None:
                return found
        return None


def cover(rules: Rules, wanted: Collection[Combination], seed: int = 0) -> list[dict[str, str]]:
    """Rows that hold every combination of `wanted`, all of one size, that can stand in a row.

    Features are in the order of `rules.features` in each row.
    """
    # The order decides which rows are made: that of sets differs from run to run.
    left = dict.fromkeys(sorted(wanted, key=sorted))
    chance = random.Random(seed)
    rows = []
    while left:
        first = next(iter(left))
        made = [row for _ in range(TRIES) if (row := _row(rules, left, first, chance)) is not None]
        if not made:
            del left[first]
            continue
        best = max(made, key=lambda row: len(_held(row, left, len(first))))
        for done in _held(best, left, len(first)):
            del left[done]
        rows.append({name: best[name] for name in rules.features})
    return rows


def _held(row: Row, left: Collection[Combination], size: int) -> list[Combination]:
    return [combination for combination in held(row, size) if combination in left]


def _row(
    rules: Rules, left: Collection[Combination], first: Combination, chance: random.Random
) -> dict[str, str] | None:
    """A row with `first`, whose other features take the values that complete most of `left`."""
    row = dict(first)
    if not rules.allow(row):
        return None
    names = [name for name in rules.features if name not in row]
    chance.shuffle(names)
    for name in names:
        values = [v for v in rules.features[name] if rules.allow({**row, name: v})]
        if not values:
            # What was chosen shuts out this feature: take the plainest row instead.
            return rules.complete(dict(first))
        chance.shuffle(values)
        row[name] = max(values, key=lambda value: _gain(row, (name, value), left, len(first)))
    return row


def _gain(row: Row, choice: Choice, left: Collection[Combination], size: int) -> int:
    """How many combinations of `left` `choice` completes."""
    others = itertools.combinations(row.items(), size - 1)
    return sum(1 for chosen in others if frozenset((choice, *chosen)) in left)
