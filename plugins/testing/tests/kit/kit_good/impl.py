"""What the declaration names: it may import torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from pydantic import BaseModel, ConfigDict, Field


class KitParams(BaseModel):
    """Keyword arguments of `kit_sgd`."""

    model_config = ConfigDict(extra="forbid")
    lr: float = Field(0.1, description="Learning rate.")


def kit_sgd(params: Iterable[torch.Tensor], lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr)


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a + b
