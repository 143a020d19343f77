"""The core's own drivers, declared through the same hooks as everybody's (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from ds_core.entries import AcceleratorEntry, OptimizerEntry


def _missing(name: str) -> str | None:
    """Why torch has no device of this name to use; None if it has one.

    Counts devices only: none is initialized.
    """
    import torch

    device_type = torch._C._get_privateuse1_backend_name() if name == "privateuse1" else name
    module = getattr(torch, device_type, None)
    if module is None:
        return "no package has registered a PrivateUse1 device with torch"
    if module.device_count() > 0:
        return None
    return (
        f"torch {torch.__version__} sees no {device_type} device: its build, the driver or the "
        "environment lacks it"
    )


_ACCELERATORS = (
    *(
        AcceleratorEntry(
            name, name, f"ds_core.accelerator.generic:{name}", partial(_missing, name), priority
        )
        for name, priority in (("cuda", 40), ("xpu", 30), ("mps", 20), ("privateuse1", 10))
    ),
    AcceleratorEntry("cpu", "cpu", "ds_core.accelerator.cpu:CpuAccelerator"),
)


def ds_accelerators() -> Iterable[AcceleratorEntry]:
    """cpu, and one generic backend for cuda, xpu, mps and PrivateUse1 devices."""
    return _ACCELERATORS


def ds_optimizers() -> Mapping[str, OptimizerEntry]:
    """torch's optimizers under their documented names."""
    from ds_core.setup.optim import OPTIMIZERS

    return OPTIMIZERS
