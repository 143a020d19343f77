"""Weights in 8 and 4 bits: groups of one row in whole numbers, with scales (and lows) in fp16.

The numbers are those of the kernel ``quantize`` (`ds_kernel_kit.references`), row by row: int8 symmetric has one
element per weight; 4 bits are two to a byte, the first in the low half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ds_kernel_kit import references
from torch import Tensor

__all__ = ["Quantized", "dequantize", "quantize"]


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A matrix [out, in] in `bits` (8 or 4); weight ≈ q * scale, or q * scale + low.

    q: int8 [out, in], or uint8 [out, in / 2]; symmetric 4-bit numbers are two's complement, -7 .. 7; with lows 0 .. 15.
    scales, lows: fp16 [out, in / group]; lows None: symmetric. `group` divides `in` and is even.
    """

    q: Tensor
    scales: Tensor
    lows: Tensor | None
    bits: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.q.shape
        return rows, columns * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of numbers, scales and lows."""
        return self.q.nbytes + self.scales.nbytes + (self.lows.nbytes if self.lows is not None else 0)


def quantize(weight: Tensor, *, bits: int, group: int, symmetric: bool) -> Quantized:
    """`weight` [out, in] of any float dtype, in groups of `group` along a row."""
    rows, columns = weight.shape
    if columns % group:
        raise ValueError(f"groups of {group} do not divide rows of {columns}")
    q, scales, lows = references.quantize(weight.contiguous(), bits=bits, group=group, symmetric=symmetric)
    halves = [None if x is None else x.view(rows, -1).half() for x in (scales, lows)]
    assert halves[0] is not None
    return Quantized(q.view(rows, -1), halves[0], halves[1], bits, group)


def dequantize(weight: Quantized, dtype: torch.dtype) -> Tensor:
    """What `weight` stands for, as [out, in] of `dtype`."""
    rows, columns = weight.shape
    lows = None if weight.lows is None else weight.lows.float().view(-1)
    flat = references.dequantize(
        weight.q.view(-1), weight.scales.float().view(-1), lows,
        bits=weight.bits, group=weight.group, numel=rows * columns, dtype=dtype,
    )  # fmt: skip
    return flat.view(rows, columns)
