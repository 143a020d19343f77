"""Linear layers of many experts over tokens that are sorted by expert, with their backward.

Experts' weights are stacked: one parameter ``[local, out, in]`` per linear layer.

Dimensions: ``rows`` sorted by expert, ``local`` experts of this rank, ``inputs`` and ``outputs`` of
the layer.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(eq=False)
class Groups:
    """Which rows belong to which of the experts on this rank: expert i has the next ``counts[i]``
    rows.

    What follows from the counts is computed when first used.
    """

    counts: Int[Tensor, " local"]
    """int64, on the tokens' device."""

    @functools.cached_property
    def sizes(self) -> list[int]:
        """The counts as numbers (on a GPU this waits for it)."""
        return self.counts.tolist()

    @functools.cached_property
    def ends(self) -> Int[Tensor, " local"]:
        """Where each expert's rows end: int32, as torch's grouped product wants it."""
        return self.counts.cumsum(0).to(torch.int32)

    @functools.cached_property
    def expert_of_row(self) -> Int[Tensor, " rows"]:
        """The local expert of each row: int64."""
        return torch.repeat_interleave(self.counts)


def grouped_linear(
    x: Float[Tensor, "rows inputs"],
    weight: Float[Tensor, "local outputs inputs"],
    bias: Float[Tensor, "local outputs"] | None,
    groups: Groups,
) -> Float[Tensor, "rows outputs"]:
    """``F.linear`` of each row of `x` with the weights of its expert; rows are sorted by expert.

    An expert without rows gets a gradient of zeros. Under autocast all are cast as for `F.linear`.
    """
    # A custom autograd function is outside autocast, so the casts are made here.
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x = x.to(dtype)
        weight = weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    y: Tensor = _GroupedLinear.apply(x, weight, bias, groups)  # type: ignore[no-untyped-call]
    return y


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, groups: Groups) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = groups
        return _product(x, weight.transpose(1, 2), bias, groups)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        # An expanded gradient (of a sum, say) has strides of 0, which torch._grouped_mm refuses.
        grad = grad.contiguous()
        groups = ctx.groups
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        return (
            _product(grad, weight, None, groups) if needs_x else None,
            _outer(grad, x, groups) if needs_weight else None,
            _sums(grad, groups) if needs_bias else None,
            None,
        )


def _product(
    x: Float[Tensor, "rows inputs"],
    weight: Float[Tensor, "local inputs outputs"],
    bias: Float[Tensor, "local outputs"] | None,
    groups: Groups,
) -> Float[Tensor, "rows outputs"]:
    """Rows of x times their expert's weight, plus its bias."""
    if _on_device(x, weight):
        out: Tensor = torch._grouped_mm(x, weight, offs=groups.ends)
        return out if bias is None else out + bias.index_select(0, groups.expert_of_row)
    # One product per expert, each written to its place: no list of parts, no concatenation.
    out = x.new_empty(x.shape[0], weight.shape[2])
    each = zip(x.split(groups.sizes), weight.unbind(), out.split(groups.sizes), strict=True)
    if bias is None:
        for a, w, o in each:
            torch.mm(a, w, out=o)
    else:
        for (a, w, o), b in zip(each, bias.unbind(), strict=True):
            torch.addmm(b, a, w, out=o)
    return out


def _outer(
    grad: Float[Tensor, "rows outputs"], x: Float[Tensor, "rows inputs"], groups: Groups
) -> Float[Tensor, "local outputs inputs"]:
    """Per expert, the sum over its rows of the outer products: the gradient of its weight."""
    if _on_device(x, grad):
        made: Tensor = torch._grouped_mm(grad.t(), x, offs=groups.ends)
        return made
    out = x.new_empty(len(groups.sizes), grad.shape[1], x.shape[1])
    for g, a, o in zip(grad.split(groups.sizes), x.split(groups.sizes), out.unbind(), strict=True):
        torch.mm(g.t(), a, out=o)
    return out


def _sums(grad: Float[Tensor, "rows outputs"], groups: Groups) -> Float[Tensor, "local outputs"]:
    """Per expert, the sum over its rows: the gradient of its bias."""
    if grad.device.type != "cpu":
        # index_add_ rounds after each row, so 16-bit gradients are added in fp32.
        out = grad.new_zeros(
            len(groups.counts), grad.shape[1], dtype=torch.promote_types(grad.dtype, torch.float32)
        )
        return out.index_add_(0, groups.expert_of_row, grad.to(out.dtype)).to(grad.dtype)
    return torch.stack([g.sum(0) for g in grad.split(groups.sizes)])


def _on_device(a: Tensor, b: Tensor) -> bool:
    """Whether torch has one launch for all experts: bf16 on a GPU, rows of 16 bytes, a GPU that
    knows how.
    """
    if (
        a.device.type != "cuda"
        or a.dtype != torch.bfloat16
        or not hasattr(torch, "_grouped_mm")
        or not len(a)
    ):
        return False
    wide = a.shape[-1] % 8 == 0 and b.shape[-1] % 8 == 0
    return wide and torch.cuda.get_device_capability(a.device) >= (9, 0)
