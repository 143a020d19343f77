"""SOAP (Vyas et al. 2024, https://arxiv.org/abs/2409.11321): Adam in Shampoo's eigenbasis."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from ds_optimizer_kit import MatrixOptimizer
from torch import Tensor

from ds_optimizers.base import check_common
from ds_optimizers.matrices.factors import SIDES, cost_of_factors, gram, sides_with_factors

if TYPE_CHECKING:
    from jaxtyping import Float

# Of the mean eigenvalue. What a factor has not seen yet is a space without directions of its own:
# rounding would choose them, in every layout others.
_SHIFT = 1e-4


class SOAP(MatrixOptimizer):
    """Adam on matrices that are turned into the eigenbases of L = E[G G^T] and R = E[G^T G].

    betas: Adam's decay rates; the second is that of L and R, too.
    precondition_frequency: steps between two updates of the bases, by one power iteration and QR.
    max_precond_dim: sides that are longer are not turned.

    As in the authors' code, a matrix's first step makes the bases and changes nothing (but for
    weight decay), and eps is added before the bias is corrected. AdamW updates groups without
    matrices.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10_000,
    ) -> None:
        check_common(lr=lr, eps=eps, betas=betas, weight_decay=weight_decay)
        own = {
            "precondition_frequency": precondition_frequency,
            "max_precond_dim": max_precond_dim,
        }
        adam = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**adam, **own})

    def cost(self, rows: int, columns: int) -> float:
        """Six products with a basis, and those of the factors."""
        return cost_of_factors(rows, columns)

    def update(
        self,
        stack: Float[Tensor, "n rows columns"],
        group: dict[str, Any],
        states: dict[str, Tensor],
        step: int,
    ) -> Float[Tensor, "n rows columns"]:
        """See `MatrixOptimizer.update`."""
        beta1, beta2 = group["betas"]
        sides = sides_with_factors(stack, group["max_precond_dim"])
        if step == 1:
            for side in sides:
                factor = (1 - beta2) * gram(stack, side)
                states[f"{side}_factor"] = factor
                states[f"{side}_basis"] = _first_basis(factor)
            states["exp_avg"] = torch.zeros_like(stack)
            states["exp_avg_sq"] = torch.zeros_like(stack)
            return torch.zeros_like(stack)
        # 1. Adam, of which the second moment is that of turned gradients.
        count = step - 1
        states["exp_avg"].lerp_(stack, 1 - beta1)
        square = _turn(stack, states).square()
        states["exp_avg_sq"].lerp_(square, 1 - beta2)
        turned = _turn(states["exp_avg"], states)
        turned /= states["exp_avg_sq"].sqrt().add_(group["eps"])
        size = (1 - beta2**count) ** 0.5 / (1 - beta1**count)
        change: Tensor = size * _turn(turned, states, back=True)
        # 2. The factors with this gradient, and at times their bases.
        for side in sides:
            states[f"{side}_factor"].lerp_(gram(stack, side), 1 - beta2)
            if count % group["precondition_frequency"] == 0:
                _follow(states, side)
        return change


def _turn(stack: Tensor, states: dict[str, Tensor], back: bool = False) -> Tensor:
    """Q_L^T X Q_R, or back: Q_L X Q_R^T."""
    if (left := states.get("left_basis")) is not None:
        stack = (left if back else left.mT) @ stack
    if (right := states.get("right_basis")) is not None:
        stack = stack @ (right.mT if back else right)
    return stack


def _first_basis(factor: Tensor) -> Tensor:
    """Eigenvectors, of large eigenvalues first; where these are equal, near to the axes."""
    size = factor.shape[-1]
    mean = factor.diagonal(dim1=-2, dim2=-1).mean(-1)
    order = torch.linspace(1, 0, size, dtype=factor.dtype, device=factor.device)
    shift = torch.diag_embed(_SHIFT * mean[:, None] * order)
    vectors: Tensor = torch.linalg.eigh(factor + shift).eigenvectors.flip(-1)
    # The sign is open: the largest entry is positive.
    largest = vectors.abs().argmax(-2, keepdim=True)
    return vectors * vectors.gather(-2, largest).sign()


def _follow(states: dict[str, Tensor], side: str) -> None:
    """One power iteration and QR; the second moments follow their directions' new order."""
    factor = states[f"{side}_factor"]
    basis = states[f"{side}_basis"]
    mean = factor.diagonal(dim1=-2, dim2=-1).mean(-1)
    power = factor @ basis + _SHIFT * mean[:, None, None] * basis
    order = (basis * power).sum(-2).argsort(-1, descending=True)
    columns = order[:, None, :]
    power = power.gather(-1, columns.expand_as(power))
    found = torch.linalg.qr(power)
    # Each direction goes on where it pointed, whatever sign the QR gives it.
    states[f"{side}_basis"] = found.Q * found.R.diagonal(dim1=-2, dim2=-1)[:, None, :].sign()
    second = states["exp_avg_sq"]
    index = order[:, :, None] if side == "left" else columns
    states["exp_avg_sq"] = second.gather(SIDES[side], index.expand_as(second))
