"""Arithmetic of time spans: sorted lists of (begin, end) that do not touch (torch-free)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Span = tuple[float, float]


def merge(spans: Iterable[Span]) -> list[Span]:
    """The union of `spans`, which may overlap and come in any order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        elif end > begin:
            merged.append((begin, end))
    return merged


def length(spans: Iterable[Span]) -> float:
    """The sum of their lengths."""
    return sum(end - begin for begin, end in spans)


def clip(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """What of `spans` lies between `begin` and `end`."""
    return [(max(b, begin), min(e, end)) for b, e in spans if e > begin and b < end]


def overlap(span: Span, merged: list[Span]) -> float:
    """How long `span` and `merged` have in common."""
    begin, end = span
    total = 0.0
    at = max(0, bisect_right(merged, (begin, float("inf"))) - 1)
    while at < len(merged) and merged[at][0] < end:
        total += max(0.0, min(end, merged[at][1]) - max(begin, merged[at][0]))
        at += 1
    return total


def without(spans: list[Span], taken: list[Span]) -> list[Span]:
    """What of `spans` is not in `taken`; both merged."""
    left: list[Span] = []
    at = 0
    for begin, end in spans:
        while at < len(taken) and taken[at][1] <= begin:
            at += 1
        ahead = at
        while ahead < len(taken) and taken[ahead][0] < end:
            if taken[ahead][0] > begin:
                left.append((begin, taken[ahead][0]))
            begin = max(begin, taken[ahead][1])
            ahead += 1
        if begin < end:
            left.append((begin, end))
    return left
