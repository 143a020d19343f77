"""Which trial is best, and why: for each key, what the best trials with its other values reached
(torch-free).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ds_autotuning.records import Row, Status

UNITS = {"throughput": "samples/s", "latency": "s per step", "flops": "flops/s per device"}
WORDS = {
    Status.DONE: "done",
    Status.OUT_OF_MEMORY: "out of memory",
    Status.TIMEOUT: "took too long",
    Status.CRASHED: "crashed",
    Status.DOES_NOT_FIT: "does not fit, not run",
    Status.INVALID: "refused, not run",
}


@dataclass(frozen=True, slots=True)
class Other:
    """A value that the best setting does not have.

    metric: the best of the trials with it; None: none came so far.

    part: of the winner's; above 1 it would be better.
    note: what came of those trials.
    """

    value: str
    metric: float | None
    part: float | None
    note: str


@dataclass(frozen=True, slots=True)
class Key:
    """A key in which trials differ: its value in the best setting, and what others reach at their
    best.
    """

    name: str
    value: str
    others: tuple[Other, ...]

    @property
    def weight(self) -> float:
        """How much is lost with the best other value, as a part; what decides comes first."""
        parts = [other.part for other in self.others if other.part is not None]
        return 1.0 - max(parts) if parts else 1.0


def better(metric: str, one: float, other: float | None) -> bool:
    """Whether `one` is better: lower for latency, else higher; anything is better than nothing."""
    return other is None or (one < other if metric == "latency" else one > other)


def best_of(rows: Sequence[Row], metric: str) -> Row | None:
    """The best of those that came to an end; of equals the first."""
    best: Row | None = None
    for row in rows:
        value = value_of(row, metric)
        if value is not None and better(
            metric, value, None if best is None else best.result.metric(metric)
        ):
            best = row
    return best


def value_of(row: Row, metric: str) -> float | None:
    """The metric of a trial that came to an end, a finite number; else None."""
    value = row.result.metric(metric) if row.result.status is Status.DONE else None
    return value if value is not None and math.isfinite(value) else None


def keys_of(rows: Sequence[Row], best: Row, metric: str) -> list[Key]:
    """Why `best` won: for every key in which trials differ, what the best trials with its other
    values reached.
    """
    mine = value_of(best, metric)
    assert mine is not None
    found = []
    for name in dict.fromkeys(key for row in rows for key in row.setting):
        by_value: dict[str, list[Row]] = {}
        for row in rows:
            by_value.setdefault(shown(row.setting.get(name)), []).append(row)
        chosen = shown(best.setting.get(name))
        others = []
        for value, tried in by_value.items():
            if value == chosen:
                continue
            winner = best_of(tried, metric)
            reached = None if winner is None else value_of(winner, metric)
            counts = Counter(WORDS[row.result.status] for row in tried)
            note = ", ".join(f"{count} {word}" for word, count in counts.most_common())
            others.append(
                Other(
                    value, reached, None if reached is None else _part(metric, reached, mine), note
                )
            )
        if others:
            found.append(Key(name, chosen, tuple(others)))
    return sorted(found, key=lambda key: -key.weight)


def _part(metric: str, reached: float, best: float) -> float:
    one, other = (best, reached) if metric == "latency" else (reached, best)
    return one / other if other else 0.0


def shown(value: Any) -> str:
    """A value of a setting; None leaves its key out."""
    if isinstance(value, str):
        return value
    return "default" if value is None else json.dumps(value)


def number(value: float | None) -> str:
    """With about four digits; "" for None."""
    if value is None:
        return ""
    return (
        f"{value:.4g}"
        if abs(value) < 1e4
        else f"{value:,.0f}"
        if abs(value) < 1e7
        else f"{value:.3e}"
    )
