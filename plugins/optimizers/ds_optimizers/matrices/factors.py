"""What SOAP and Shampoo share: the Kronecker factors of a matrix's second moment."""

from __future__ import annotations

from torch import Tensor

SIDES = {"left": -2, "right": -1}
"""The sides of a matrix, and the dimension that each factor is for."""


def gram(stack: Tensor, side: str) -> Tensor:
    """G G^T for the left side, G^T G for the right one."""
    return stack @ stack.mT if side == "left" else stack.mT @ stack


def sides_with_factors(stack: Tensor, longest: int) -> list[str]:
    """The sides that are short enough for a factor."""
    return [side for side, dim in SIDES.items() if stack.shape[dim] <= longest]


def cost_of_factors(rows: int, columns: int) -> float:
    """Products of a matrix with square ones on both sides, and those of the factors."""
    return float(rows * columns * (rows + columns))
