"""The picture of a search: every trial's metric in the order of trials, the best so far, and where
memory went.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ds_plots.ticks import round_step

from ds_autotuning.records import Row
from ds_autotuning.search.why import better, keys_of, number, value_of

WIDTH = 860.0
HEIGHT = 340.0
LEFT = 70.0
RIGHT = 16.0
TOP = 16.0
BOTTOM = 64.0


@dataclass(frozen=True, slots=True)
class Mark:
    """One trial.

    shape: "dot" or "cross".
    colour: the number of its group.
    text: what is shown under the pointer.
    """

    x: float
    y: float
    shape: str
    colour: int
    text: str
    best: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """A label on an axis."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """All coordinates, in units of the view box.

    groups: the legend; line: points of the best so far.
    """

    marks: tuple[Mark, ...]
    line: str
    up: tuple[Tick, ...]
    along: tuple[Tick, ...]
    groups: tuple[str, ...]
    by: str
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    bottom: float = HEIGHT - BOTTOM
    right: float = WIDTH - RIGHT


def picture(rows: Sequence[Row], best: Row | None, metric: str) -> Picture:
    """Dots for trials that came to an end, crosses at the bottom for others; colours by the key
    that divides them.
    """
    by = _dividing(rows, best, metric)
    groups = sorted({_group(row, by) for row in rows}, key=_natural)
    reached = [value_of(row, metric) for row in rows]
    most = max((value for value in reached if value is not None), default=1.0) or 1.0

    def across(index: int) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (index + 0.5) / max(1, len(rows))

    def up(value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value / (most * 1.05)

    marks = []
    line = []
    so_far = None
    for index, (row, value) in enumerate(zip(rows, reached, strict=True)):
        x = across(index)
        text = ", ".join(f"{key} = {setting}" for key, setting in row.setting.items())
        said = row.result.reason or row.result.status.value.replace("_", " ")
        text = f"{row.name}: {number(value) if value is not None else said}; {text}"
        y = HEIGHT - BOTTOM if value is None else up(value)
        colour = groups.index(_group(row, by))
        marks.append(
            Mark(
                round(x, 1),
                round(y, 1),
                "cross" if value is None else "dot",
                colour,
                text,
                row is best,
            )
        )
        if value is not None and better(metric, value, so_far):
            if so_far is not None:
                line.append(f"{x:.1f},{up(so_far):.1f}")
            so_far = value
            line.append(f"{x:.1f},{up(value):.1f}")
    if so_far is not None:
        line.append(f"{WIDTH - RIGHT:.1f},{up(so_far):.1f}")
    # Four to ten lines cross the picture.
    step = round_step(most / 5)
    heights = [i * step for i in range(math.floor(most * 1.05 / step) + 1)]
    every = max(1, math.ceil(len(rows) / 20))
    return Picture(
        tuple(marks),
        " ".join(line),
        tuple(Tick(round(up(v), 1), number(v)) for v in heights),
        tuple(Tick(round(across(i), 1), str(i + 1)) for i in range(0, len(rows), every)),
        tuple(groups),
        by,
    )


def _dividing(rows: Sequence[Row], best: Row | None, metric: str) -> str:
    """The key of at most six values that tells most about the metric: ZeRO's stage where it is one
    of them.
    """
    values = {
        key: {_text(row.setting.get(key)) for row in rows} for row in rows for key in row.setting
    }
    several = [key for key, found in values.items() if 1 < len(found) <= 6]
    if not several:
        return ""
    if best is None or "zero_optimization.stage" in several:
        return next((key for key in several if key == "zero_optimization.stage"), several[0])
    return next(
        (key.name for key in keys_of(rows, best, metric) if key.name in several), several[0]
    )


def _group(row: Row, by: str) -> str:
    return _text(row.setting.get(by)) if by else ""


def _text(value: object) -> str:
    return "default" if value is None else str(value)


def _natural(text: str) -> tuple[bool, float, str]:
    try:
        return False, float(text), text
    except ValueError:
        return True, 0.0, text
