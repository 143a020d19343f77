"""Copies between boxes of one array: which elements of a stored box go where in a wanted one
(torch-free).

A rank that has some columns of a matrix has a box of it, and a partitioner leaves it a range of
that flattened box.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ds_run_state.slices import Box

Range = tuple[int, int]


class Move(NamedTuple):
    """Runs of elements at equal distances, to be copied. All numbers are elements, not bytes."""

    # Where the first run starts.
    source: int
    target: int
    # How many runs there are, and how long each is.
    rows: int
    length: int
    # Distance from the start of one run to the start of the next.
    source_step: int
    target_step: int


def moves(
    source: Box,
    held: Range,
    target: Box,
    wanted: Range,
    *,
    at: Sequence[int] = (),
    within: Sequence[int] = (),
) -> Iterator[Move]:
    """The copies from elements `held` of the row-major flattened `source` to elements `wanted` of
    `target`.

    Both are boxes of one array, and only what is in both is copied. Offsets are relative to
    ``held[0]`` and ``wanted[0]``. Boxes that differ in the first dimension only need one run; rows
    of equal distance are one `Move`.
    at, within: where `target` begins in an array of the shape `within`, which has several boxes
        side by side; `wanted` is then a range of that array flattened.
    """
    at = at or (0,) * len(target.size)
    within = within or target.size
    if source == target and within == target.size:  # by far the most common
        # A run that saved at the same layout: elements have the same offsets in both arrays.
        start = max(held[0], wanted[0])
        stop = min(held[1], wanted[1])
        if start < stop:
            yield Move(
                start - held[0], start - wanted[0], 1, stop - start, stop - start, stop - start
            )
        return
    low, both = _intersect(source, target)
    if 0 in both:
        return
    outer, run = _fold(both, source.size, within)
    length = math.prod(both[run:])
    rows = math.prod(both[outer:run])
    to_source, source_step = _places(source.size, _minus(low, source.first), run, length)
    to_target, target_step = _places(within, _minus(low, _minus(target.first, at)), run, length)
    # One pattern of rows per index of the outer dimensions. `held` and `wanted` cut it by counting
    # the elements of the pattern that lie before their bounds.
    for index in itertools.product(*(range(n) for n in both[:outer])):
        here = to_source(index)
        to = to_target(index)
        first = max(
            _before(held[0], here, source_step, length), _before(wanted[0], to, target_step, length)
        )
        last = min(
            _before(held[1], here, source_step, length), _before(wanted[1], to, target_step, length)
        )
        places = (here - held[0], to - wanted[0])
        yield from _pieces(
            first, min(last, rows * length), length, places, (source_step, target_step)
        )


def _intersect(source: Box, target: Box) -> tuple[list[int], list[int]]:
    """What both boxes have, by dimension: first index, and length (0 where they do not meet)."""
    low = [max(a, b) for a, b in zip(source.first, target.first, strict=True)]
    ends = (
        min(a + n, b + m)
        for a, n, b, m in zip(source.first, source.size, target.first, target.size, strict=True)
    )
    return low, [max(0, end - start) for start, end in zip(low, ends, strict=True)]


def _fold(both: Sequence[int], source: Sequence[int], within: Sequence[int]) -> tuple[int, int]:
    """(first dimension of the rows, first dimension of a run): see `moves`.

    both: the size of what is copied; it is cut from arrays of the sizes `source` and `within`.
    """
    # A dimension is alike where both arrays have exactly what they share of it: there the step from
    # one index to the next leaves no gap, so it folds into the dimension before it.
    alike = [n == a == b for n, a, b in zip(both, source, within, strict=True)]
    # The innermost dimension in which they differ: a run is what they share of it.
    run = len(both) - 1
    while run > 0 and alike[run]:
        run -= 1
    # Rows: the dimensions from here to `run`, where all but the first are alike.
    outer = max(run - 1, 0)
    while outer > 0 and alike[outer]:
        outer -= 1
    return outer, run


def _minus(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x - y for x, y in zip(a, b, strict=True)]


def _places(
    shape: Sequence[int], low: Sequence[int], run: int, length: int
) -> tuple[Callable[[Sequence[int]], int], int]:
    """The offset in a flattened array of the rows of an index (relative to `low`), and the distance
    between rows.
    """
    strides = [math.prod(shape[d + 1 :]) for d in range(len(low))]
    base = sum(x * s for x, s in zip(low, strides, strict=True))

    def place(index: Sequence[int]) -> int:
        return base + sum(i * s for i, s in zip(index, strides, strict=False))

    # A single run is its own row, so any distance will do.
    return place, strides[run - 1] if run > 0 else length


def _before(bound: int, start: int, step: int, length: int) -> int:
    """How many elements of runs of `length`, from `start` on every `step`, lie before `bound`."""
    # Elements between the rows are no elements of the runs, hence the minimum.
    row, column = divmod(max(0, bound - start), step)
    return row * length + min(column, length)


def _pieces(first: int, last: int, length: int, at: Range, steps: Range) -> Iterator[Move]:
    """Elements [first, last) of such runs: the rest of a row, full rows, the beginning of a row."""
    while first < last:
        row, column = divmod(first, length)
        # A row that is cut at its front or end is a move of its own; full rows in between are one.
        count = 1 if column or last - first < length else (last - first) // length
        take = min(length - column, last - first)
        yield Move(
            at[0] + row * steps[0] + column, at[1] + row * steps[1] + column, count, take, *steps
        )
        first += take * count


def form_grid(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether `boxes` are the cells of a grid over an array of that shape, each once."""
    # A grid is the product of its cuts along each dimension, and each cut must be without gaps.
    if not all(box.inside(shape) for box in boxes):
        return False
    cells = 1
    for d, size in enumerate(shape):
        ranges = sorted({(box.first[d], box.size[d]) for box in boxes})
        cells *= len(ranges)
        if [f for f, _ in ranges] + [size] != [0, *itertools.accumulate(n for _, n in ranges)]:
            return False
    return len(set(boxes)) == len(boxes) == cells
