"""The declaration of old-accelerator: a device (torch-free)."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ds_core.entries import AcceleratorEntry


def probe() -> str | None:
    """None where the device can be used, else the reason why not. It must start nothing."""
    return None if os.environ.get("OLD_ACCELERATOR") else "OLD_ACCELERATOR is not set"


def ds_accelerators() -> Iterable[AcceleratorEntry]:
    """device_type: torch's name of it. The highest priority that can be used is taken."""
    return [
        AcceleratorEntry(
            "old_accelerator",
            device_type="cpu",
            load="old_accelerator.device:OldAccelerator",
            probe=probe,
            priority=10,
        )
    ]
