"""Dion (Ahn et al. 2025, https://arxiv.org/abs/2504.05295): momentum orthogonalised at low rank."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from ds_optimizer_kit import MatrixOptimizer
from torch import Tensor

from ds_optimizers.base import check_common

if TYPE_CHECKING:
    from jaxtyping import Float


class Dion(MatrixOptimizer):
    """w -= lr sqrt(rows / columns) P Q^T, where P Q^T follows the momentum's largest directions.

    momentum: the share of what was applied that stays in the momentum; of what was not, all stays.
    rank_fraction: the rank of P and Q, as a share of the smaller side, rounded up.

    One power iteration a step, as in the paper's algorithm 1: P is B Q orthogonalised by QR, and Q
    is B^T P with columns of length 1, where B is the momentum with the gradient. AdamW updates
    groups without matrices.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.01,
        momentum: float = 0.95,
        rank_fraction: float = 0.25,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        check_common(lr=lr, eps=eps, betas=betas, weight_decay=weight_decay)
        if not 0 < rank_fraction <= 1:
            raise ValueError(f"rank_fraction {rank_fraction} must be in (0, 1]")
        own = {"momentum": momentum, "rank_fraction": rank_fraction}
        adam = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**adam, **own})

    def cost(self, rows: int, columns: int) -> float:
        """Four products of the matrix with one of low rank."""
        return float(rows * columns * min(rows, columns))

    def update(
        self,
        stack: Float[Tensor, "n rows columns"],
        group: dict[str, Any],
        states: dict[str, Tensor],
        step: int,
    ) -> Float[Tensor, "n rows columns"]:
        """See `MatrixOptimizer.update`."""
        count, rows, columns = stack.shape
        if step == 1:
            rank = math.ceil(group["rank_fraction"] * min(rows, columns))
            states["momentum_buffer"] = torch.zeros_like(stack)
            states["right_factor"] = _start(columns, rank).to(stack).repeat(count, 1, 1)
        right = states["right_factor"]
        # 1. The momentum at low rank: B is about P R^T.
        total = states["momentum_buffer"] + stack
        left = torch.linalg.qr(total @ right).Q
        weighted = total.mT @ left
        # 2. Of what is applied now, the momentum forgets a part.
        states["momentum_buffer"] = total - (1 - group["momentum"]) * left @ weighted.mT
        lengths = torch.linalg.vector_norm(weighted, dim=-2, keepdim=True)
        # 3. A direction that no gradient has had yet stays what it is: what is there is rounding.
        rounding = 8 * max(rows, columns) * torch.finfo(stack.dtype).eps
        none = lengths <= rounding * lengths.amax(-1, keepdim=True)
        found = torch.where(none, 0, weighted / (lengths + group["eps"]))
        states["right_factor"] = torch.where(none, right, found)
        change: Tensor = (rows / columns) ** 0.5 * left @ found.mT
        return change


def _start(columns: int, rank: int) -> Tensor:
    """The same in every run, wherever the matrix is."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(columns, rank, generator=generator, dtype=torch.float64)
