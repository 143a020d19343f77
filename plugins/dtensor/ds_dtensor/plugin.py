"""Declaration: what this package offers (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ds_core.entries import Ref

if TYPE_CHECKING:
    from ds_core.context import Context


def ds_engine_methods() -> Mapping[str, Ref]:
    """``engine.state_dict`` and ``engine.load_state_dict``, in place of the module's own."""
    return {
        "state_dict": "ds_dtensor.weights:state_dict",
        "load_state_dict": "ds_dtensor.loading:load_state_dict",
    }


def ds_open(ctx: Context) -> None:
    """The module's own ``load_state_dict`` takes DTensors, too."""
    from ds_dtensor.loading import load_by_module

    load_by_module(ctx)
