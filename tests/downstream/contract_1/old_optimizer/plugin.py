"""The declaration of old-optimizer: an optimizer (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import OptimizerEntry


def ds_optimizers() -> Mapping[str, OptimizerEntry]:
    """grain: what the arithmetic needs whole: an "element", a "tensor" (it uses norms) or a "matrix"."""
    return {
        "OldOptimizer": OptimizerEntry(
            "old_optimizer.optimizer:OldOptimizer",
            params="old_optimizer.params:Params",
            grain="element",
        )
    }
