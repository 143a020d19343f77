"""Optimizers for ds_core, by name in the config or as classes.

Nothing heavy is imported here: classes load on first use (PEP 562). `plugin` declares the names, `config` holds the
models of ``optimizer.params``; `base` is what the optimizers on kernels share, `onebit` the 1-bit family.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_optimizers.adagrad import Adagrad, CPUAdagrad, DeepSpeedCPUAdagrad
    from ds_optimizers.adam import Adam, AdamW, CPUAdam, DeepSpeedCPUAdam, FusedAdam
    from ds_optimizers.lamb import FusedLamb, Lamb
    from ds_optimizers.lion import CPULion, DeepSpeedCPULion, FusedLion, Lion
    from ds_optimizers.muon import Muon
    from ds_optimizers.onebit.adam import OneBitAdam
    from ds_optimizers.onebit.lamb import OneBitLamb
    from ds_optimizers.onebit.zero_one import ZeroOneAdam
    from ds_optimizers.sgd import SGD

__version__ = "0.1.0"

_HOMES = {
    "adam": ("Adam", "AdamW", "CPUAdam", "DeepSpeedCPUAdam", "FusedAdam"),
    "adagrad": ("Adagrad", "CPUAdagrad", "DeepSpeedCPUAdagrad"),
    "lion": ("Lion", "CPULion", "DeepSpeedCPULion", "FusedLion"),
    "lamb": ("Lamb", "FusedLamb"),
    "muon": ("Muon",),
    "sgd": ("SGD",),
    "onebit.adam": ("OneBitAdam",),
    "onebit.zero_one": ("ZeroOneAdam",),
    "onebit.lamb": ("OneBitLamb",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Adagrad",
    "Adam",
    "AdamW",
    "CPUAdagrad",
    "CPUAdam",
    "CPULion",
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
    "Lamb",
    "Lion",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "SGD",
    "ZeroOneAdam",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
