"""An optimizer and a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from pydantic import Field

from ds_core.config import Section


class AcmeSignParams(Section):
    """``optimizer.params`` of AcmeSign."""

    lr: float = Field(0.1, gt=0, description="Step length.")


class AcmeSign(torch.optim.Optimizer):
    """Moves every element by `lr` against its gradient's sign."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step; `closure` is not needed."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad.sign(), alpha=group["lr"])


class HalvingParams(Section):
    """``scheduler.params`` of AcmeHalving."""

    every: int = Field(1, ge=1, description="Halve the learning rate every so many steps.")


def make_halving(
    optimizer: torch.optim.Optimizer, every: int = 1
) -> torch.optim.lr_scheduler.LRScheduler:
    """A schedule that halves every `every` steps."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // every))
