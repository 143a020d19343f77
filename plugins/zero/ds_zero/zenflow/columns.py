"""Which elements of a rank's fragment belong to chosen columns of a weight, and which columns are
important.

A weight is seen as a matrix whose columns are its last dimension. A fragment is a range of it,
flattened: the end of one row, full rows, the beginning of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Shaped


class Rectangle(NamedTuple):
    """`rows` rows of a fragment, `width` columns from `first` on; `at`: where it begins in the flat
    fragment.
    """

    at: int
    rows: int
    first: int
    width: int

    def of(self, flat: Shaped[Tensor, " fragment"]) -> Shaped[Tensor, "rows width"]:
        """These elements of a flat fragment, as a matrix that shares its memory."""
        return flat[self.at : self.at + self.rows * self.width].view(self.rows, self.width)


def rectangles(start: int, stop: int, columns: int) -> list[Rectangle]:
    """The elements [start, stop) of a matrix with so many columns."""
    found = []
    at = 0
    while start < stop:
        first = start % columns
        rows = 1 if first or stop - start < columns else (stop - start) // columns
        width = min(columns - first, stop - start)
        found.append(Rectangle(at, rows, first, width))
        start = start + rows * width
        at = at + rows * width
    return found


def squares(
    parts: Sequence[Rectangle], flat: Shaped[Tensor, " fragment"], columns: int
) -> Float[Tensor, " columns"]:
    """For each column the sum of squares of this fragment's elements, in fp64 for fp64 and complex
    ones, else fp32.
    """
    wide = torch.float64 if flat.dtype in (torch.float64, torch.complex128) else torch.float32
    total = torch.zeros(columns, dtype=wide, device=flat.device)
    for part in parts:
        norm = torch.linalg.vector_norm(
            part.of(flat), dim=0, dtype=torch.promote_types(wide, flat.dtype)
        )
        total[part.first : part.first + part.width] += norm.square()
    return total


def count_of(columns: int, ratio: float) -> int:
    """How many of `columns` columns are chosen: `ratio` of them, rounded, but at least one unless
    `ratio` is 0.
    """
    return min(columns, max(1, round(ratio * columns))) if ratio > 0 else 0


def important(norms: Float[Tensor, " columns"], count: int) -> Int[Tensor, " count"]:
    """The `count` columns with the largest norms, in order; of equal ones the first."""
    return torch.sort(norms, descending=True, stable=True).indices[:count].sort().values


@dataclass(frozen=True, slots=True)
class Chosen:
    """The elements of one fragment that are updated on the device, in the order of the fragment."""

    # Rectangles, and which of their columns.
    places: tuple[tuple[Rectangle, Tensor], ...] = ()
    # Where these are all elements: their number.
    everything: int | None = None

    @classmethod
    def of(cls, parts: Sequence[Rectangle], columns: Tensor) -> Chosen:
        """Those of `columns`, in order."""
        places = []
        for part in parts:
            inside = (
                columns[(columns >= part.first) & (columns < part.first + part.width)] - part.first
            )
            if inside.numel():
                places.append((part, inside))
        return cls(tuple(places))

    @property
    def numel(self) -> int:
        """How many there are."""
        if self.everything is not None:
            return self.everything
        return sum(p.rows * c.numel() for p, c in self.places)

    def take(self, flat: Shaped[Tensor, " fragment"]) -> Shaped[Tensor, " chosen"]:
        """Their values in a flat fragment, as a new flat tensor."""
        if self.everything is not None:
            return flat.clone()
        found = [p.of(flat).index_select(1, c.to(flat.device)).reshape(-1) for p, c in self.places]
        return torch.cat(found) if found else flat.new_empty(0)

    def put(self, flat: Shaped[Tensor, " fragment"], values: Shaped[Tensor, " chosen"]) -> None:
        """Write them into a flat fragment, cast and moved to where it is."""
        values = values.to(flat.device, flat.dtype)
        if self.everything is not None:
            flat.copy_(values)
            return
        begin = 0
        for part, inside in self.places:
            size = part.rows * inside.numel()
            some = values[begin : begin + size].view(part.rows, -1)
            part.of(flat).index_copy_(1, inside.to(flat.device), some)
            begin += size
