"""The device. For one that torch has a module for, inherit `ds_core.accelerator.generic.TorchAccelerator`."""

from __future__ import annotations

from ds_core.accelerator.cpu import CpuAccelerator


class OldAccelerator(CpuAccelerator):
    """The CPU under another name."""

    name = "old_accelerator"
