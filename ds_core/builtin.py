"""The core's own drivers, declared through the same hooks as everybody's (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ds_core.entries import AcceleratorEntry, OptimizerEntry, SchedulerEntry

__all__ = ["ds_accelerators", "ds_optimizers", "ds_schedulers"]


def ds_accelerators() -> Iterable[AcceleratorEntry]:
    """cpu, and one generic backend for cuda, xpu, mps and PrivateUse1 devices."""
    where = "ds_core.accelerator"
    torch_devices = (("cuda", 40), ("xpu", 30), ("mps", 20), ("privateuse1", 10))
    for name, priority in torch_devices:
        yield AcceleratorEntry(name, name, f"{where}.generic:{name}", f"{where}.probes:{name}", priority)
    yield AcceleratorEntry("cpu", "cpu", f"{where}.cpu:CpuAccelerator")


def ds_optimizers() -> Mapping[str, OptimizerEntry]:
    """torch's optimizers under their documented names."""
    from ds_core.optim import OPTIMIZERS

    return OPTIMIZERS


def ds_schedulers() -> Mapping[str, SchedulerEntry]:
    """torch's schedules by class name."""
    from ds_core.optim import SCHEDULERS

    return SCHEDULERS
