"""A chart as the page shows it before its script runs: places in percent, so that text keeps its
size at any width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ds_plots.ticks import cover, label


@dataclass(frozen=True, slots=True)
class Line:
    """One curve, thinned."""

    # Index of its run, which chooses the colour.
    run: int
    name: str
    x: Sequence[float]
    y: Sequence[float]
    faint: bool = False
    # Means of neighbouring points: the course of a curve of more points than the page has.
    mean_x: Sequence[float] = ()
    mean_y: Sequence[float] = ()


@dataclass(slots=True)
class Chart:
    """One chart, with its axes."""

    key: str
    title: str
    unit: str
    lines: list[Line]
    # Whether the y axis begins at 0.
    zero: bool = False
    # The text below the chart.
    note: str = ""
    # First and last value of each axis, and the ticks as (place in percent, text).
    x_range: tuple[float, float] = field(init=False)
    y_range: tuple[float, float] = field(init=False)
    x_ticks: list[tuple[float, str]] = field(init=False)
    y_ticks: list[tuple[float, str]] = field(init=False)

    def __post_init__(self) -> None:
        xs = [v for line in self.lines for v in line.x if math.isfinite(v)]
        ys = [v for line in self.lines for v in line.y if math.isfinite(v)]
        low, high = (min(ys), max(ys)) if ys else (0.0, 1.0)
        ticks = cover(min(low, 0.0) if self.zero else low, high, 4)
        pad = (high - low) * 0.04
        bottom = min(low, 0.0) if self.zero else low - pad if low < 0 else max(low - pad, 0.0)
        top = high + pad
        if top <= bottom:
            bottom = ticks[0]
            top = ticks[-1]
        self.y_range = (bottom, top)
        self.x_range = (min(xs), max(xs)) if xs else (0.0, 1.0)
        if 0 < self.x_range[0] <= self.x_range[1] * 0.02:
            self.x_range = (0.0, self.x_range[1])
        if self.x_range[0] == self.x_range[1]:
            self.x_range = (self.x_range[0] - 1, self.x_range[1] + 1)
        self.y_ticks = self._placed(ticks, self.y_range, flip=True)
        self.x_ticks = self._placed(cover(*self.x_range, 5), self.x_range)

    def _placed(
        self, ticks: Sequence[float], around: tuple[float, float], flip: bool = False
    ) -> list[tuple[float, str]]:
        low, high = around
        step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
        places = [(tick, (tick - low) / (high - low) * 100) for tick in ticks]
        return [
            (round(100 - p if flip else p, 3), label(t, step))
            for t, p in places
            if -0.01 <= p <= 100.01
        ]

    def path(self, line: Line, mean: bool = False) -> str:
        """The curve in a square of 1000 by 1000, with gaps where values are not finite.

        mean: its course.
        """
        xs, ys = (line.mean_x, line.mean_y) if mean else (line.x, line.y)
        x0, x1 = self.x_range
        y0, y1 = self.y_range
        parts = []
        pen = "M"
        for x, y in zip(xs, ys, strict=True):
            if not (math.isfinite(x) and math.isfinite(y)):
                pen = "M"
                continue
            parts.append(
                f"{pen}{(x - x0) / (x1 - x0) * 1000:.4g} {1000 - (y - y0) / (y1 - y0) * 1000:.4g}"
            )
            pen = "L"
        return "".join(parts)

    def summary(self) -> str:
        """The chart in words, for those who do not see it."""
        said = []
        for line in self.lines:
            ys = [v for v in line.y if math.isfinite(v)]
            if ys:
                said.append(f"{line.name} from {ys[0]:.4g} to {ys[-1]:.4g}")
        return f"{self.title}: {'; '.join(said[:8])}" if said else f"{self.title}: no values"
