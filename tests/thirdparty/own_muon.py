"""A matrix optimizer of somebody else's: it follows the sign of the singular values, by an SVD.

It knows of no layout: dscore-optimizer-kit brings whole matrices to `update`, and their results back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ds_core.entries import OptimizerEntry

if TYPE_CHECKING:
    from ds_core.context import Context


def ds_optimizers() -> Mapping[str, OptimizerEntry]:
    return {
        "Spectral": OptimizerEntry(
            "own_muon:make",
            groups="ds_optimizer_kit.matrix_optimizer:split",
            grain="matrix",
            collects=True,
        )
    }


def ds_open(ctx: Context) -> None:
    from ds_optimizer_kit import bind

    bind(ctx)


def make(params: Any, lr: float = 0.01, momentum: float = 0.9) -> Any:
    import torch
    from ds_optimizer_kit import MatrixOptimizer

    class Spectral(MatrixOptimizer):
        """w -= lr * U V^T, where U S V^T is the momentum."""

        def prepare(self, group: Any, grad: Any, state: Any) -> Any:
            buffer = state.setdefault("momentum_buffer", torch.zeros_like(grad))
            return buffer.mul_(momentum).add_(grad)

        def update(self, stack: Any, group: Any, states: Any, step: int) -> Any:
            u, _, vh = torch.linalg.svd(stack, full_matrices=False)
            return u @ vh

    return Spectral(params, {"lr": lr})
