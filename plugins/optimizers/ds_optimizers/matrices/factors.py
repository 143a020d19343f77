"""What SOAP and Shampoo share: the Kronecker factors of a matrix's second moment."""

from __future__ import annotations

from torch import Tensor

SIDES = {"left": -2, "right": -1}
"""The sides of a matrix, and the dimension that each factor is for."""


def gram(stack: Tensor, side: str) -> Tensor:
    """G G^T for the left side, G^T G for the right one."""
    return stack @ stack.mT if side == "left" else stack.mT @ stack
