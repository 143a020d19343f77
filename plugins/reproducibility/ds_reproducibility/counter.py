"""Random bits as a function of a key and the indices of an element: no state, and the same on every
device.

The element's bits are a hash of two row values and a column value, which are themselves hashes of
the key and the indices. Only the last of these steps is made for each element, so the cost is that
of about six integer operations.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
# Of "lowbias32", found by search for a hash of 32 bits with little bias: Wellons 2018, "Prospecting
# for hash functions".
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B
_GOLDEN = 0x9E3779B9
_BLOCK = 1 << 18
"""Elements that are hashed at a time: what fits into a cache."""


class Key(NamedTuple):
    """Two words of 32 bits, signed."""

    first: int
    second: int

    @classmethod
    def of(cls, *parts: int | str) -> Key:
        """The key of `parts`; parts that differ in anything give another one."""
        digest = _digest(parts)
        return cls(*(int.from_bytes(digest[at : at + 4], "little", signed=True) for at in (0, 4)))

    def other(self) -> Key:
        """A second key that follows from this one."""
        return Key(self.second, ~self.first)


def number_of(*parts: int | str) -> int:
    """As `Key.of`: one number of 63 bits."""
    return int.from_bytes(_digest(parts)[:8], "little") >> 1


def _digest(parts: Sequence[int | str]) -> bytes:
    # repr keeps ("a", "b") and ("a, b",) apart.
    return hashlib.blake2b(repr(tuple(parts)).encode(), digest_size=16).digest()


class Grid:
    """The elements of a tensor by their indices in the whole that it is a part of.

    What of the hash does not depend on a key is made once. Dimensions: ``rows`` all combinations of
    the leading indices, ``columns`` the last index.
    """

    def __init__(self, indices: Sequence[Tensor]) -> None:
        """indices: of each dimension, int64, 1-d, of one device; values from 0 to 2^32 - 1."""
        self.shape = tuple(len(index) for index in indices)
        *leading, last = indices or [torch.zeros(1, dtype=torch.int64)]
        rows = torch.tensor([[_FIRST], [_SECOND]], device=last.device)  # [2, rows]
        for index in leading:
            # The constant keeps index 0 from leaving a value of 0 as it is.
            one_more = rows.unsqueeze(-1) ^ ((index + _GOLDEN) & _WORD)
            rows = _mix(one_more).reshape(2, one_more.shape[1] * len(index))
        self.rows = rows.shape[1]
        self.columns = len(last)
        # Two values for each row and one for each column, in one tensor: one call serves all.
        self.values = _as_int32(torch.cat([rows[0], rows[1], _mix(last)]))

    def reshaped(self, shape: Sequence[int]) -> Grid:
        """The same elements, in a tensor of another shape."""
        self.shape = tuple(shape)
        return self


def bits(key: Key, grid: Grid) -> Tensor:
    """Random bits for the elements of `grid`: int32 of its shape, every bit pattern equally likely.

    Only the upper 24 bits are good.
    """
    # 1. The key enters the values of rows and columns. This is lowbias32 without its first step, as
    # their bits are mixed already. The shift of a signed number copies its sign, which a mask takes
    # away.
    mixed = torch.bitwise_xor(grid.values, key.first)
    mixed.mul_(_signed(_FIRST))
    mixed.bitwise_xor_((mixed >> 15).bitwise_and_(0x1FFFF))
    mixed.add_(key.second)
    mixed.mul_(_signed(_SECOND))
    mixed.bitwise_xor_((mixed >> 16).bitwise_and_(0xFFFF))
    rows = grid.rows
    first, second = mixed[: 2 * rows].view(2, rows, 1)
    column = mixed[2 * rows :]
    # 2. A row's and a column's value give an element's. A device has its own scheduler; a CPU's
    # cache is small.
    found = torch.empty(rows, grid.columns, dtype=torch.int32, device=mixed.device)
    block = max(1, _BLOCK // max(1, grid.columns)) if found.device.type == "cpu" else max(1, rows)
    for at in range(0, rows, block):
        part = found[at : at + block]
        torch.add(first[at : at + block], column, out=part)
        part.mul_(_signed(_FIRST))
        part.bitwise_xor_((part >> 15).bitwise_and_(0x1FFFF))
        # The second value of the row: two rows that are alike in the first are not in both.
        part.add_(second[at : at + block])
        part.mul_(_signed(_SECOND))
    return found.view(grid.shape)


def _mix(value: Tensor) -> Tensor:
    """lowbias32 of int64 values from 0 to 2^32 - 1."""
    value = value ^ (value >> 16)
    value = (value * _FIRST) & _WORD
    value = value ^ (value >> 15)
    value = (value * _SECOND) & _WORD
    return value ^ (value >> 16)


def _as_int32(value: Tensor) -> Tensor:
    """The same 32 bits."""
    return torch.where(value > 0x7FFFFFFF, value - (1 << 32), value).to(torch.int32)


def _signed(word: int) -> int:
    return word - (1 << 32) if word > 0x7FFFFFFF else word


# -- distributions ---------------------------------------------------------------------------------


def below(key: Key, grid: Grid, probability: float) -> Tensor:
    """bool: true with `probability` (0 to 1), which is rounded to a multiple of 2^-32."""
    threshold = round(probability * 2**32)
    if threshold >= 2**32:
        return torch.ones(grid.shape, dtype=torch.bool, device=grid.values.device)
    # The smallest of the signed numbers is the smallest of the fractions.
    return bits(key, grid) < threshold - 2**31


def uniform(key: Key, grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform in [0, 1): multiples of 2^-24; of 2^-48 in fp64; fewer bits in 16-bit dtypes."""
    if dtype == torch.float64:
        high = _fraction(key, grid)
        low = _fraction(key.other(), grid)
        return high.double() + low.double() * 2.0**-24
    found = _fraction(key, grid)
    if dtype == torch.float32:
        return found
    # Rounding to fewer bits could give 1.
    steps = 2.0 / torch.finfo(dtype).eps
    return (found * steps).floor().div_(steps).to(dtype)


def normal(key: Key, grid: Grid, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal (Box and Muller 1958). Devices differ by the rounding of log and cos."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    radius = uniform(key, grid, wide).neg_().add_(1).log_().mul_(-2).sqrt_()
    angle = uniform(key.other().other(), grid, wide)
    return angle.mul_(2 * math.pi).cos_().mul_(radius).to(dtype)


def _fraction(key: Key, grid: Grid) -> Tensor:
    upper = (bits(key, grid) >> 8).bitwise_and_(0xFFFFFF)
    return upper.to(torch.float32).mul_(2.0**-24)
