"""The layers of divided_layers.py, and a model with them."""

from __future__ import annotations

from typing import Any

import torch
from ds_run_state.changes import Shared
from torch import Tensor, nn

from ds_core import comm


class Copied(torch.autograd.Function):
    """Identity; the sum over ranks in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grad = grad.clone()
        comm.all_reduce(grad, group=ctx.group)
        return grad, None


class Summed(torch.autograd.Function):
    """The sum over ranks; identity in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        comm.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


copied: Any = Copied.apply
summed: Any = Summed.apply


class Up(nn.Linear):
    """Some rows of a layer."""

    group: Shared
    fault: str

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if self.fault == "gradient" else copied(x, self.group.value))


class Down(nn.Linear):
    """Some columns of a layer."""

    group: Shared
    fault: str

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "bias":
            return summed(super().forward(x), self.group.value)  # type: ignore[no-any-return]
        return summed(nn.functional.linear(x, self.weight), self.group.value) + self.bias  # type: ignore[no-any-return]


class Model(nn.Module):
    """A pair of layers whose width divides by nothing, between two that all ranks have."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(7, 6)
        self.up = nn.Linear(6, 11)
        self.down = nn.Linear(11, 6)
        self.out = nn.Linear(6, 5)

    def forward(self, x: Tensor, y: Tensor, use_extra: bool = False) -> Tensor:
        hidden = self.inp(x)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return nn.functional.cross_entropy(
            self.out(hidden).to(torch.promote_types(x.dtype, torch.float32)), y
        )


def model() -> nn.Module:
    return Model()
