"""Mixture of experts for ds_core. Names load on first use, so that importing the package brings in no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_moe.experts import Experts
    from ds_moe.gating import Routing, TopKGate
    from ds_moe.grouped import Groups, grouped_linear
    from ds_moe.layer import MoE

__all__ = ["Experts", "Groups", "MoE", "Routing", "TopKGate", "grouped_linear"]

_HOME = {
    "Experts": "experts",
    "Groups": "grouped",
    "MoE": "layer",
    "Routing": "gating",
    "TopKGate": "gating",
    "grouped_linear": "grouped",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
