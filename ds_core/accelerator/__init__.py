"""Device kinds: the contract, the CPU, one generic back end over torch's devices, and the choice (torch-free)."""

from __future__ import annotations

from ds_core.accelerator.contract import Accelerator, BuildFlags, HostEvent
from ds_core.accelerator.cpu import CpuAccelerator
from ds_core.accelerator.generic import TorchAccelerator
from ds_core.accelerator.select import (
    candidates,
    get_accelerator,
    reset_accelerator,
    select_accelerator,
    set_accelerator,
)

__all__ = [
    "Accelerator",
    "BuildFlags",
    "CpuAccelerator",
    "HostEvent",
    "TorchAccelerator",
    "candidates",
    "get_accelerator",
    "reset_accelerator",
    "select_accelerator",
    "set_accelerator",
]
