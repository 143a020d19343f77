"""What ds_core is told. Loading this loads no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ds_core.entries import AcceleratorEntry
from torch_abacus import LIBRARY, register

if TYPE_CHECKING:
    from ds_core.accelerator import TorchAccelerator


def ds_accelerators() -> Iterable[AcceleratorEntry]:
    """The abacus."""
    return [AcceleratorEntry("abacus", "abacus", "torch_abacus.plugin:make", missing)]


def missing() -> str | None:
    """Why there is no abacus to use; None if there is one."""
    if not LIBRARY.exists():
        return f"{LIBRARY} was not built; install torch-abacus again"
    register()
    import torch

    return None if torch.abacus.is_available() else "ABACUS_DEVICES is 0"


def make() -> TorchAccelerator:
    """All that an accelerator does is in ``torch.abacus`` already."""
    from ds_core.accelerator import TorchAccelerator

    register()
    return TorchAccelerator("abacus")
