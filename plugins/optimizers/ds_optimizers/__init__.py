"""Optimizers for ds_core, by name in the config or as classes.

Nothing heavy is imported here: classes load on first use (PEP 562). `plugin` declares the names,
`config` holds the models of ``optimizer.params``; `base` is what the optimizers on kernels share,
`onebit` the 1-bit family.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_optimizers.adagrad import Adagrad, CPUAdagrad, DeepSpeedCPUAdagrad
    from ds_optimizers.adam import Adam, AdamW, CPUAdam, DeepSpeedCPUAdam, FusedAdam
    from ds_optimizers.lamb import FusedLamb, Lamb
    from ds_optimizers.lion import CPULion, DeepSpeedCPULion, FusedLion, Lion
    from ds_optimizers.muon import Muon
    from ds_optimizers.mup import MuAdam, MuAdamW, MuSGD
    from ds_optimizers.onebit.adam import OneBitAdam
    from ds_optimizers.onebit.lamb import OneBitLamb
    from ds_optimizers.onebit.zero_one import ZeroOneAdam
    from ds_optimizers.sgd import SGD

__version__ = "0.1.0"


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
    "MuAdam",
    "MuAdamW",
    "MuSGD",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "SGD",
    "ZeroOneAdam",
]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "adagrad": "Adagrad CPUAdagrad DeepSpeedCPUAdagrad",
        "adam": "Adam AdamW CPUAdam DeepSpeedCPUAdam FusedAdam",
        "lamb": "FusedLamb Lamb",
        "lion": "CPULion DeepSpeedCPULion FusedLion Lion",
        "muon": "Muon",
        "mup": "MuAdam MuAdamW MuSGD",
        "onebit.adam": "OneBitAdam",
        "onebit.lamb": "OneBitLamb",
        "onebit.zero_one": "ZeroOneAdam",
        "sgd": "SGD",
    },
)
