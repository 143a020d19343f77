"""Weights in 8 and 4 bits: groups of one row in whole numbers, with scales (and lows) in fp16.

The numbers are those of the kernel ``quantize`` (`ds_kernel_kit.references`), row by row: int8
symmetric has one element per weight; 4 bits are two to a byte, the first in the low half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from ds_kernel_kit import references
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Integer


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A matrix [out, inner] in 8 or 4 bits: weight ≈ q * scale, or q * scale + low."""

    # int8 (uint8 with lows), or uint8 with two numbers a byte: inner / 2 of them. Symmetric 4-bit
    # numbers are two's complement, -7 .. 7; with lows 0 .. 15.
    q: Integer[Tensor, "out packed"]
    # fp16, one for each `group` numbers of a row.
    scales: Float[Tensor, "out groups"]
    # Likewise; None: symmetric.
    lows: Float[Tensor, "out groups"] | None
    # Bits of a number: 8 or 4.
    bits: int
    # Divides `inner`, and is even, so that no byte has numbers of two groups.
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(out, inner)."""
        rows, columns = self.q.shape
        return rows, columns * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """Bytes of numbers, scales and lows."""
        return (
            self.q.nbytes + self.scales.nbytes + (self.lows.nbytes if self.lows is not None else 0)
        )


def quantize(
    weight: Float[Tensor, "out inner"],
    *,
    bits: int,
    group: int,
    symmetric: bool,
    kernel: Callable[..., Any] = references.quantize,
) -> Quantized:
    """`weight`, of any float dtype, in groups of `group` along a row.

    kernel: a provider of ``quantize``.

    ValueError: groups do not divide a row, or fp16 cannot represent their scales to 8 bits.
    """
    rows, columns = weight.shape
    if columns % group:
        raise ValueError(f"groups of {group} do not divide rows of {columns}")
    found = kernel(weight.detach().contiguous(), bits=bits, group=group, symmetric=symmetric)
    # Groups divide a row, so the kernel's flat result falls into rows.
    q = found[0].view(rows, -1)
    wide = [None if x is None else x.view(rows, -1) for x in found[1:]]
    scales, lows = (None if x is None else x.half() for x in wide)
    assert scales is not None and wide[0] is not None
    # A scale beyond fp16's range, or so small that it has few bits left, would change the weights.
    if not bool(((scales.float() - wide[0]).abs() <= wide[0] * 2**-8).all()) or (
        lows is not None and lows.isinf().any()
    ):
        raise ValueError("its scales are not numbers of fp16")
    return Quantized(q, scales, lows, bits, group)


def dequantize(weight: Quantized, dtype: torch.dtype) -> Float[Tensor, "out inner"]:
    """What `weight` stands for, in `dtype`."""
    q = weight.q
    if weight.bits == 4:
        q = torch.stack([q & 15, q >> 4], -1).flatten(1)
        # Two's complement of 4 bits to one of 8.
        q = (q ^ 8).to(torch.int8) - 8 if weight.lows is None else q
    whole: Tensor = q.unflatten(1, (-1, weight.group)).float() * weight.scales.float()[..., None]
    if weight.lows is not None:
        whole += weight.lows.float()[..., None]
    return whole.to(dtype).flatten(1)
