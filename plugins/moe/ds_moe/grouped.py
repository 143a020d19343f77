"""Linear layers of many experts over tokens that are sorted by expert, with their backward.

Experts' weights are stacked: one parameter ``[experts, out, in]`` per linear layer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Groups", "grouped_linear"]


@dataclass(eq=False)
class Groups:
    """Which rows belong to which of the experts on this rank: expert i has the next ``counts[i]`` rows.

    counts: int64 ``[local experts]``, on the tokens' device. `sizes` and `ends` are made when first asked for.
    """

    counts: Tensor

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The counts as numbers (on a GPU this waits for it)."""
        return self.counts.tolist()

    @functools.cached_property
    def ends(self) -> Tensor:
        """Where each expert's rows end: int32."""
        return self.counts.cumsum(0).to(torch.int32)

    @functools.cached_property
    def expert_of_row(self) -> Tensor:
        """The local expert of each row: int64 ``[rows]``."""
        return torch.repeat_interleave(self.counts)


def grouped_linear(x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
    """``F.linear`` of each row of `x` with the weights of its expert.

    x: [M, in], sorted by expert. weight: [experts, out, in], bias: [experts, out] or None. Returns [M, out].
    An expert without rows gets a gradient of zeros.
    """
    y: Tensor = _GroupedLinear.apply(x, weight, groups)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias.index_select(0, groups.expert_of_row)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = groups
        return _product(x, weight.transpose(1, 2), groups)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x = _product(grad, weight, ctx.groups) if ctx.needs_input_grad[0] else None
        grad_w = _outer(grad, x, ctx.groups) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None


def _product(x: Tensor, weight: Tensor, groups: Groups) -> Tensor:
    """Rows of x [M, in] times their expert's weight [experts, in, out]."""
    out = x.new_empty(x.shape[0], weight.shape[2])
    for a, w, o in zip(x.split(groups.sizes), weight.unbind(), out.split(groups.sizes), strict=True):
        torch.mm(a, w, out=o)
    return out


def _outer(grad: Tensor, x: Tensor, groups: Groups) -> Tensor:
    """Per expert, the sum over its rows of the outer products: [experts, out, in]."""
    out = x.new_empty(len(groups.sizes), grad.shape[1], x.shape[1])
    for g, a, o in zip(grad.split(groups.sizes), x.split(groups.sizes), out.unbind(), strict=True):
        torch.mm(g.t(), a, out=o)
    return out
