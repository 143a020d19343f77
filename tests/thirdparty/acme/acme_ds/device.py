"""The acme device: this machine's cores under another name."""

from __future__ import annotations

import os

from ds_core.accelerator.cpu import CpuAccelerator


def probe() -> str | None:
    """An acme device is there when ``ACME_DEVICE`` says so."""
    return None if os.environ.get("ACME_DEVICE") else "no acme device is plugged in"


class AcmeAccelerator(CpuAccelerator):
    """Everything as on the CPU."""

    name = "acme"
