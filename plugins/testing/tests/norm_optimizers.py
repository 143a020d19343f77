"""Optimizers that divide by the norm of a tensor: one says so, the other does not (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_core.entries import OptimizerEntry


def ds_optimizers() -> Mapping[str, OptimizerEntry]:
    return {
        "SaysSo": OptimizerEntry("norm_optimizers:make", grain="tensor"),
        "DoesNot": OptimizerEntry("norm_optimizers:make"),
    }


def make(params: Any, lr: float = 0.01) -> Any:
    import torch

    class Normed(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None and param.numel():
                        param -= group["lr"] * param.grad / param.grad.norm()

    return Normed(params, {"lr": lr})
