"""Declaration: what this package offers (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import Ref


def ds_engine_methods() -> Mapping[str, Ref]:
    """``engine.evaluate``."""
    return {"evaluate": "ds_evaluation.evaluate:evaluate"}
