"""GaLore (Zhao et al. 2024, https://arxiv.org/abs/2403.03507): Adam on gradients at low rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from ds_optimizer_kit import MatrixOptimizer
from torch import Tensor

from ds_optimizers.base import check_common

if TYPE_CHECKING:
    from jaxtyping import Float


class GaLore(MatrixOptimizer):
    """AdamW on P^T G for matrices that are wide (G P for tall ones); w -= lr scale P N.

    rank: of the projection P, an orthonormal basis of the gradient's largest singular vectors on
        the matrix's smaller side.
    update_proj_gap: steps between two computations of P, by an SVD of that step's gradient.
    scale: of updates; alpha in the paper.

    As in the authors' code the moments stay what they are when P changes. AdamW updates groups
    without matrices.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
    ) -> None:
        check_common(lr=lr, eps=eps, betas=betas, weight_decay=weight_decay)
        own = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale}
        adam = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**adam, **own})

    def update(
        self,
        stack: Float[Tensor, "n rows columns"],
        group: dict[str, Any],
        states: dict[str, Tensor],
        step: int,
    ) -> Float[Tensor, "n rows columns"]:
        """See `MatrixOptimizer.update`."""
        beta1, beta2 = group["betas"]
        # A tall matrix is worked on as its transpose.
        tall = stack.shape[-2] >= stack.shape[-1]
        wide = stack.mT if tall else stack
        # 1. The basis, now and then.
        if (step - 1) % group["update_proj_gap"] == 0:
            states["basis"] = _basis(wide, group["rank"])
        basis = states["basis"]
        # 2. Adam at low rank.
        low = basis.mT @ wide
        first = states.setdefault("exp_avg", torch.zeros_like(low)).lerp_(low, 1 - beta1)
        second = states.setdefault("exp_avg_sq", torch.zeros_like(low))
        second.lerp_(low.square(), 1 - beta2)
        deviation = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        change: Tensor = basis @ (first / (1 - beta1**step) / deviation) * group["scale"]
        return change.mT if tall else change


def _basis(wide: Tensor, rank: int) -> Tensor:
    """The first left singular vectors, each with its largest entry positive.

    An SVD leaves the sign open, which the moments must not take for a change of direction. Where
    the gradient has fewer directions than `rank` (an expert that got few tokens), rounding would
    choose the others, in every layout others: they are those near to the axes instead.
    """
    vectors, values, _ = torch.linalg.svd(wide, full_matrices=False)
    vectors = vectors[..., :rank]
    values = values[..., :rank]
    known = values > values[..., :1] * (8 * max(wide.shape[-2:]) * torch.finfo(wide.dtype).eps)
    if not bool(known.all()):
        places = torch.arange(vectors.shape[-1], device=wide.device)
        # The n-th that is not known is the n-th outside of those that are.
        index = (places - known.sum(-1, keepdim=True)).clamp(min=0)
        others = _outside(vectors * known[..., None, :])
        others = others.gather(-1, index[..., None, :].expand_as(vectors))
        vectors = torch.where(known[..., None, :], vectors, others)
    largest = vectors.abs().argmax(-2, keepdim=True)
    found: Tensor = vectors * vectors.gather(-2, largest).sign()
    return found


def _outside(vectors: Tensor) -> Tensor:
    """An orthonormal basis of what is orthogonal to `vectors`, the first axes first; it begins the
    columns.
    """
    size = vectors.shape[-2]
    rest = torch.eye(size).to(vectors) - vectors @ vectors.mT
    order = torch.linspace(2, 1, size).to(vectors)
    found: Tensor = torch.linalg.eigh((rest * order) @ rest).eigenvectors.flip(-1)
    return found
