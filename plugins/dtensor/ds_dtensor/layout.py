"""Which boxes of a parameter the elements on a rank are: arithmetic only (torch-free).

A rank has a range of a row-major flattened parameter, which may begin and end inside a row. Such a
range is a few boxes: of a matrix at most three, the end of a row, whole rows, and the begin of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ds_run_state.slices import Box


@dataclass(frozen=True, slots=True)
class Window:
    """A box of the full tensor, and where its elements are in what this rank has.

    stride, offset: in elements, from the begin of this rank's tensor.
    """

    box: Box
    stride: tuple[int, ...]
    offset: int


def boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """The boxes of an array of `shape` that its flattened elements [start, stop) are, in order.

    With each, where it begins in that range.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ()), 0
        return
    inner = math.prod(shape[1:])
    low, begin = divmod(start, inner)
    high, end = divmod(stop, inner)
    if low == high:  # all within one row
        yield from _row(shape, low, begin, end, 0)
        return
    at = 0
    if begin:
        yield from _row(shape, low, begin, inner, 0)
        at = inner - begin
        low += 1
    if low < high:
        first = (low, *(0 for _ in shape[1:]))
        yield Box(first, (high - low, *shape[1:])), at
        at += (high - low) * inner
    if end:
        yield from _row(shape, high, 0, end, at)


def _row(
    shape: Sequence[int], row: int, start: int, stop: int, at: int
) -> Iterator[tuple[Box, int]]:
    """The boxes of [start, stop) of one index of the first dimension."""
    for box, begin in boxes(shape[1:], start, stop):
        yield Box((row, *box.first), (1, *box.size)), at + begin


def contiguous(size: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major array of that size."""
    return tuple(math.prod(size[d + 1 :]) for d in range(len(size)))
