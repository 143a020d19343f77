"""Sums over rows of full tensors, of which ranks have parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from ds_run_state.slices import Slice
from torch import Tensor

if TYPE_CHECKING:
    from ds_optimizer_kit import Layout, ParamPart


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one full tensor, and the elements of them that this rank has."""

    count: int
    length: int
    """Elements of a full row."""
    numbers: Tensor
    """Of the rows that this rank has elements of; on the CPU."""
    columns: int
    """Elements of a row in this rank's slice."""
    before: int
    """Elements of the first row that are on another rank, and of the last (`after`)."""
    after: int

    @classmethod
    def of(cls, part: ParamPart, lead: int) -> Rows:
        """The rows of a tensor whose first `lead` dimensions number them."""
        shape = part.shape
        held = part.mine
        ranges = held.slice.ranges[:lead]
        count = math.prod(shape[:lead])
        numbers = torch.arange(count).view(shape[:lead])
        numbers = Slice(shape[:lead], ranges, held.slice.axes).take(numbers).reshape(-1)
        columns = max(math.prod(held.slice.size[lead:]), 1)
        last = -(-held.stop // columns)
        return cls(
            count,
            math.prod(shape[lead:]),
            numbers[held.start // columns : last],
            columns,
            held.start % columns,
            -held.stop % columns,
        )

    def sums(self, values: Tensor) -> Tensor:
        """What this rank's elements add to the sum of each full row, in fp64."""
        padded = torch.nn.functional.pad(values.reshape(-1), (self.before, self.after))
        sums = padded.view(-1, self.columns).sum(1, dtype=torch.float64)
        total = sums.new_zeros(self.count)
        total[self.numbers.to(total.device)] = sums
        return total

    def spread(self, rows: Tensor, like: Tensor) -> Tensor:
        """For each element of this rank, what `rows` has for its row."""
        mine = rows.to(like.device)[self.numbers.to(like.device)].to(like.dtype)
        return over_elements(mine, self.columns, self.before, like.shape)


def over_elements(values: Tensor, columns: int, before: int, shape: torch.Size) -> Tensor:
    """For each element of a range of rows, in `shape`, what `values` has for its row.

    columns: elements of a row.
    before: those of the first row that are not in the range.
    """
    flat = values[:, None].expand(-1, columns).reshape(-1)
    return flat[before : before + shape.numel()].view(shape)


def add_up(
    layout: Layout, rows: Mapping[Tensor, Rows], values: Mapping[Tensor, Tensor]
) -> dict[Tensor, Tensor]:
    """The sums of the rows of full tensors, in fp64. Collective.

    rows: of the tensors that take part, the same on all ranks.
    values: this rank's elements; of those without any, and without a gradient, it has none.
    """
    local = {tensor: rows[tensor].sums(value) for tensor, value in values.items()}
    counts = {id(layout.parts[tensor]): each.count for tensor, each in rows.items()}
    sums = layout.sums(
        local,
        length=lambda part: counts[id(part)],
        of=lambda part: part.cut and id(part) in counts,
    )
    return {**local, **sums}
