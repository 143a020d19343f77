"""Shampoo (Gupta et al. 2018, https://arxiv.org/abs/1802.09568) with moments, roots and grafting.

As in practice (Anil et al. 2020, https://arxiv.org/abs/2002.09018; Shi et al. 2023,
https://arxiv.org/abs/2309.06497): factors are running means, their roots are worked out now and
then, and the size of an update may be another optimizer's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from ds_optimizer_kit import MatrixOptimizer
from torch import Tensor

from ds_optimizers.base import check_common
from ds_optimizers.matrices.factors import cost_of_factors, gram, sides_with_factors

if TYPE_CHECKING:
    from jaxtyping import Float

GRAFTS = ("adam", "sgd", "none")


class Shampoo(MatrixOptimizer):
    """w -= lr L^(-1/4) M R^(-1/4), where L = E[G G^T], R = E[G^T G] and M = E[G].

    betas: decay rates of M, and of L and R.
    damping: added to the eigenvalues of L and R before their roots are taken.
    grafting: whose size an update has: "adam", that of Adam's update; "sgd", that of M; or "none".
    precondition_frequency: steps between two computations of the roots.
    max_precond_dim: sides that are longer have no factor; with one factor its root is the second.

    All means are corrected for having begun at zero. AdamW updates groups without matrices.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        damping: float = 1e-12,
        grafting: str = "adam",
        precondition_frequency: int = 10,
        max_precond_dim: int = 10_000,
    ) -> None:
        check_common(lr=lr, eps=eps, betas=betas, weight_decay=weight_decay)
        if grafting not in GRAFTS:
            raise ValueError(f"grafting {grafting!r}: one of {', '.join(GRAFTS)}")
        own = {
            "damping": damping,
            "grafting": grafting,
            "precondition_frequency": precondition_frequency,
            "max_precond_dim": max_precond_dim,
        }
        adam = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**adam, **own})

    def cost(self, rows: int, columns: int) -> float:
        """Products with the roots, and those of the factors."""
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
        # 1. The factors, and at times their roots.
        for side in sides:
            square = gram(stack, side)
            factor = states.setdefault(f"{side}_factor", torch.zeros_like(square))
            factor.lerp_(square, 1 - beta2)
            if (step - 1) % group["precondition_frequency"] == 0:
                root = _inverse_root(factor / (1 - beta2**step), 2 * len(sides), group["damping"])
                states[f"{side}_root"] = root
        # 2. The mean of gradients, preconditioned.
        mean = states.setdefault("exp_avg", torch.zeros_like(stack)).lerp_(stack, 1 - beta1)
        mean = mean / (1 - beta1**step)
        change: Tensor = mean
        if "left" in sides:
            change = states["left_root"] @ change
        if "right" in sides:
            change = change @ states["right_root"]
        if group["grafting"] == "none":
            return change
        # 3. The size that another optimizer would give it.
        like = mean
        if group["grafting"] == "adam":
            second = states.setdefault("exp_avg_sq", torch.zeros_like(stack))
            second.lerp_(stack.square(), 1 - beta2)
            like = mean / (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        found: Tensor = change * (_norm(like) / _norm(change).clamp(min=1e-30))
        return found


def _norm(stack: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(stack, dim=(-2, -1), keepdim=True)
    return norms


def _inverse_root(factor: Tensor, order: int, damping: float) -> Tensor:
    """(factor + damping)^(-1 / order), of symmetric matrices without negative eigenvalues."""
    values, vectors = torch.linalg.eigh(factor)
    # Rounding makes small ones negative.
    powers = (values.clamp(min=0) + damping) ** (-1 / order)
    found: Tensor = (vectors * powers[..., None, :]) @ vectors.mT
    return found
