"""The methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_core.running import RunningEngine


def count_parameters(engine: RunningEngine, *, trainable_only: bool = False) -> int:
    """How many elements the parameters of the engine's model have."""
    params = engine.module.parameters()
    return sum(p.numel() for p in params if p.requires_grad or not trainable_only)
