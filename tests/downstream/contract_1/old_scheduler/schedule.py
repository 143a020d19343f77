"""The schedule, as one of torch's."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def halving(optimizer: Optimizer, every: int = 100) -> LambdaLR:
    """Half of the learning rates after every `every` steps."""
    return LambdaLR(optimizer, lambda step: 0.5 ** (step // every))
