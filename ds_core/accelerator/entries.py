"""The accelerators that come with the core (torch-free)."""

from __future__ import annotations

from ds_core.entries import AcceleratorEntry

__all__ = ["ENTRIES"]

ENTRIES: tuple[AcceleratorEntry, ...] = (
    *(
        AcceleratorEntry(
            name, name, f"ds_core.accelerator.generic:{name}", f"ds_core.accelerator.probes:{name}", priority
        )
        for name, priority in (("cuda", 40), ("xpu", 30), ("mps", 20), ("privateuse1", 10))
    ),
    AcceleratorEntry("cpu", "cpu", "ds_core.accelerator.cpu:CpuAccelerator"),
)
