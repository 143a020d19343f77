"""Mixture of experts for ds_core. Names load on first use, so that importing the package brings in no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_moe.dispatch import dispatch
    from ds_moe.grouped import Groups, grouped_linear

__all__ = ["Groups", "dispatch", "grouped_linear"]

_HOME = {"Groups": "grouped", "dispatch": "dispatch", "grouped_linear": "grouped"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
