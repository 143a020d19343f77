"""The kernel. The reference of the operation defines what it does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements, in fp64."""
    total = torch.zeros((), dtype=torch.float64)
    for tensor in tensors:
        wide = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        total += wide.double().square().sum().cpu()
    return total
