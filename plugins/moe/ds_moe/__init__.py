"""Mixture of experts for ds_core.

Names load on first use, so that importing the package brings in no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_moe.experts import Experts
    from ds_moe.gating import Routing, TopKGate
    from ds_moe.grouped import Groups, grouped_linear
    from ds_moe.layer import MoE

__all__ = ["Experts", "Groups", "MoE", "Routing", "TopKGate", "grouped_linear"]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "experts": "Experts",
        "gating": "Routing TopKGate",
        "grouped": "Groups grouped_linear",
        "layer": "MoE",
    },
)
