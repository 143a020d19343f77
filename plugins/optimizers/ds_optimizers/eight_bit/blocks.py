"""A tensor in 8 bits per value: blocks of 256, each with the scale of its largest one.

Dettmers et al. 2022, https://arxiv.org/abs/2110.02861, section 2. Within a block values are divided
by the largest one, sign and all, and stored as the nearest of 256 numbers, which lie closer to each other the
smaller they are: each decade down to 1e-7 has half as many as the one above it. Which one is the
nearest is looked up by the first 16 bits of a value.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ds_optimizers.moments.compact import Compact, wrapped

SIZE = 256
"""Values in a block."""
PORTION = 4096 * SIZE
"""Values that are read at a time."""
_DECADES = 7


@functools.cache
def numbers(signed: bool) -> Tensor:
    """The 256 numbers in [-1, 1] that a code stands for, ascending; in [0, 1] unless `signed`.

    The decade [10^-(i+1), 10^-i] has the middles of 2^(6-i) equal parts, with either sign, or of
    twice as many without. 0 and 1 are among them.
    """
    found = [0.0, 1.0]
    for place in range(_DECADES):
        count = 2 ** (_DECADES - 1 - place) * (1 if signed else 2)
        edges = torch.linspace(0.1, 1, count + 1, dtype=torch.float64)
        middles = (10.0**-place * (edges[1:] + edges[:-1]) / 2).tolist()
        found += [*middles, *(-x for x in middles)] if signed else middles
    return torch.tensor(sorted(found), dtype=torch.float32)


@functools.cache
def _codes(signed: bool) -> Tensor:
    """For the 2^16 numbers of bf16, as their bits say them, the code of the nearest of `numbers`.

    Without a sign nothing but 0 becomes 0: it is divided by.
    """
    known = numbers(signed)
    edges = (known[1:] + known[:-1]) / 2
    if not signed:
        edges[0] = 0.0
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16).float().nan_to_num()
    return torch.bucketize(values, edges).to(torch.uint8)


class Blocks(Compact):
    """A tensor that is kept in 8 bits."""

    codes: Tensor
    """uint8, one for each value, flat."""
    scales: Tensor
    """fp32, one for each block."""
    signed: bool
    first: int
    """Values of the first block that are elsewhere, before the first one here."""

    @staticmethod
    def __new__(
        cls, codes: Tensor, scales: Tensor, shape: torch.Size, signed: bool, first: int
    ) -> Blocks:
        """As `zeros` and `of` make one."""
        made = wrapped(cls, shape, codes, torch.float32)
        made.codes = codes
        made.scales = scales
        made.signed = signed
        made.first = first
        return made  # type: ignore[no-any-return]

    def __init__(self, *given: Any) -> None:
        """See `Blocks.of`, which makes one."""

    @classmethod
    def zeros(cls, shape: torch.Size, device: torch.device, signed: bool, first: int = 0) -> Blocks:
        """Of zeros.

        first: where the values begin in a block.
        """
        count = -(-(first + shape.numel()) // SIZE)
        scales = torch.zeros(count, dtype=torch.float32, device=device)
        zero = int(torch.nonzero(numbers(signed) == 0))
        codes = torch.full((shape.numel(),), zero, dtype=torch.uint8, device=device)
        return cls(codes, scales, shape, signed, first)

    @classmethod
    def of(cls, values: Tensor, signed: bool, first: int = 0) -> Blocks:
        """The nearest to `values`; first: see `zeros`."""
        made = cls.zeros(values.shape, values.device, signed, first)
        made.replace(values)
        return made

    def replace(self, values: Tensor) -> None:
        """See `Compact.replace`."""
        flat = values.detach().reshape(-1)
        for part in self.portions():
            self.store(part, flat[part])

    def portions(self) -> Iterator[slice]:
        """Ranges of the flat values that are whole blocks, but for the first and the last."""
        count = self.codes.numel()
        edges = [0, *range(PORTION - self.first, count, PORTION), count]
        for begin, end in itertools.pairwise(edges):
            if begin < end:
                yield slice(begin, end)

    def read(self, part: slice) -> Tensor:
        """The values of one of `portions`, in fp32."""
        known = numbers(self.signed).to(self.codes.device)
        before, blocks = self._place(part)
        flat = known.index_select(0, self.codes[part].int())
        rows = _rows(flat, before) * self.scales[blocks, None]
        return rows.view(-1)[before : before + flat.numel()]

    def store(self, part: slice, values: Tensor) -> None:
        """Store the values of one of `portions`."""
        before, blocks = self._place(part)
        rows = _rows(values.float(), before)
        # The largest with its sign: it is stored exactly, and what is read is stored the same again.
        largest = rows.gather(1, rows.abs().argmax(1, keepdim=True))
        self.scales[blocks] = largest.view(-1)
        shares = rows / torch.where(largest != 0, largest, 1)
        bits = shares.bfloat16().view(torch.int16).view(-1)[before : before + values.numel()]
        codes = _codes(self.signed).to(self.codes.device)
        self.codes[part] = codes.index_select(0, bits.int() & 0xFFFF)

    def _place(self, part: slice) -> tuple[int, slice]:
        """How many values of its first block are before a portion, and its blocks."""
        begin = part.start + self.first
        return begin % SIZE, slice(begin // SIZE, -(-(part.stop + self.first) // SIZE))

    def dense(self) -> Tensor:
        """In fp32, in the shape of the tensor."""
        parts = [self.read(part) for part in self.portions()]
        flat = torch.cat(parts) if parts else self.scales.new_empty(0)
        return flat.view(self.shape)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """As torch asks of a tensor that is made of others."""
        return ["codes", "scales"], (self.signed, self.first)

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, shape: Any, stride: Any) -> Blocks:
        """The reverse."""
        return Blocks(inner["codes"], inner["scales"], torch.Size(shape), *context)


def _rows(flat: Tensor, first: int) -> Tensor:
    """Blocks as rows, with zeros for values that are not here."""
    count = -(-(first + flat.numel()) // SIZE)
    after = count * SIZE - first - flat.numel()
    return torch.nn.functional.pad(flat, (first, after)).view(count, SIZE)
