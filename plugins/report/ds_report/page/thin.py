"""Fewer points, the same picture."""

from __future__ import annotations

import math
from collections.abc import Sequence

BUCKETS = 400


def thin(y: Sequence[float], buckets: int = BUCKETS) -> list[int]:
    """The indices of the points to draw: of each of `buckets` equal parts the first, last, lowest
    and highest.

    No minimum or maximum is lost. Of values that are not finite one per part is kept, so that the
    line has its gap.
    """
    size = len(y)
    if size <= 4 * buckets:
        return list(range(size))
    kept: list[int] = []
    for bucket in range(buckets):
        start = bucket * size // buckets
        stop = (bucket + 1) * size // buckets
        part = y[start:stop]
        if math.isfinite(sum(part)):
            chosen = {0, len(part) - 1, part.index(min(part)), part.index(max(part))}
        else:
            good = [i for i, v in enumerate(part) if math.isfinite(v)]
            bad = next((i for i, v in enumerate(part) if not math.isfinite(v)), None)
            chosen = (
                {
                    good[0],
                    good[-1],
                    min(good, key=part.__getitem__),
                    max(good, key=part.__getitem__),
                }
                if good
                else set()
            )
            chosen |= set() if bad is None else {bad}
        kept += [start + i for i in sorted(chosen)]
    return kept


def means(
    x: Sequence[float], y: Sequence[float], buckets: int = BUCKETS
) -> tuple[list[float], list[float]]:
    """The middle x and the mean of the finite y of each of `buckets` equal parts: the course of a
    curve.

    Empty where `thin` keeps every point. The points that it keeps have no meaningful mean: extremes
    are among them.
    """
    size = len(y)
    if size <= 4 * buckets:
        return [], []
    found: tuple[list[float], list[float]] = [], []
    for bucket in range(buckets):
        start = bucket * size // buckets
        stop = (bucket + 1) * size // buckets
        good = [v for v in y[start:stop] if math.isfinite(v)]
        found[0].append(float(x[(start + stop) // 2]))
        found[1].append(sum(good) / len(good) if good else math.nan)
    return found
