"""The optimizer: steps of one length, by the signs of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT


class OldOptimizer(torch.optim.Optimizer):
    """param -= lr * (sign(grad) + weight_decay * param)."""

    def __init__(self, params: ParamsT, lr: float = 0.01, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.mul_(1 - group["lr"] * group["weight_decay"])
                    param.sub_(param.grad.sign(), alpha=group["lr"])
        return loss
