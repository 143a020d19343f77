"""Accelerators: the contract, the CPU, one implementation for every torch device, and selection (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core.lazy import names_on_first_use

if TYPE_CHECKING:
    from ds_core.accelerator.contract import Accelerator as Accelerator
    from ds_core.accelerator.contract import HostEvent as HostEvent
    from ds_core.accelerator.cpu import CpuAccelerator as CpuAccelerator
    from ds_core.accelerator.generic import TorchAccelerator as TorchAccelerator
    from ds_core.accelerator.select import (
        candidates as candidates,
    )
    from ds_core.accelerator.select import (
        get_accelerator as get_accelerator,
    )
    from ds_core.accelerator.select import (
        reset_accelerator as reset_accelerator,
    )
    from ds_core.accelerator.select import (
        select_accelerator as select_accelerator,
    )
    from ds_core.accelerator.select import (
        set_accelerator as set_accelerator,
    )

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "contract": "Accelerator HostEvent",
        "cpu": "CpuAccelerator",
        "generic": "TorchAccelerator",
        "select": "candidates get_accelerator reset_accelerator select_accelerator set_accelerator",
    },
)
