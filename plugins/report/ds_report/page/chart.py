"""A chart as the page shows it before its script runs: places in percent, so that text keeps its
size at any width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Line:
    """One curve, thinned. run: index of its run, for the colour. mean_x, mean_y: its course, where
    it is cut.
    """

    run: int
    name: str
    x: Sequence[float]
    y: Sequence[float]
    faint: bool = False
    mean_x: Sequence[float] = ()
    mean_y: Sequence[float] = ()


@dataclass(slots=True)
class Chart:
    """One chart. zero: whether its y axis begins at 0. note: what stands below it."""

    key: str
    title: str
    unit: str
    lines: list[Line]
    zero: bool = False
    note: str = ""
    x_range: tuple[float, float] = field(init=False)
    y_range: tuple[float, float] = field(init=False)
    x_ticks: list[tuple[float, str]] = field(init=False)
    y_ticks: list[tuple[float, str]] = field(init=False)

    def __post_init__(self) -> None:
        xs = [v for line in self.lines for v in line.x if math.isfinite(v)]
        ys = [v for line in self.lines for v in line.y if math.isfinite(v)]
        low, high = (min(ys), max(ys)) if ys else (0.0, 1.0)
        ticks = nice_ticks(min(low, 0.0) if self.zero else low, high, 4)
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
        self.x_ticks = self._placed(nice_ticks(*self.x_range, 5), self.x_range)

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
        """The curve in a square of 1000 by 1000, with gaps where values are not finite. mean: its
        course.
        """
        xs, ys = (line.mean_x, line.mean_y) if mean else (line.x, line.y)
        (x0, x1), (y0, y1) = self.x_range, self.y_range
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


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers that cover low to high; the first is at most `low` and the last
    at least `high`.
    """
    if not high > low:
        spread = abs(low) * 0.1 or 1.0
        low = low - spread
        high = high + spread
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def label(value: float, step: float) -> str:
    """A tick's number, short: 12000 is 12k, 0.00003 is 3e-5; `step` says how many digits tell ticks
    apart.
    """
    if abs(value) < step * 1e-6:
        return "0"
    size = max(abs(value), step)
    if size >= 1e15 or size < 1e-3 or (step < 1e-3 and size < 0.01):
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    for unit, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")):
        if size >= unit * (10 if sign == "k" else 1) or unit == 1.0:
            digits = max(0, math.ceil(-math.log10(step / unit) - 1e-9)) if step < unit else 0
            digits += 1 if step / unit * 10**digits % 1 > 1e-6 else 0
            text = f"{value / unit:.{digits}f}"
            return text + sign
    return f"{value:g}"
