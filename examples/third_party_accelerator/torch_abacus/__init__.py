"""The abacus: a device that computes on the host, with memory, streams and random numbers of its
own.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["register"]

LIBRARY = Path(__file__).with_name("_library.so")


def register() -> None:
    """Make ``abacus`` a device of torch, with ``torch.abacus`` and the collectives "hostgloo"; once
    per process.
    """
    import torch

    if getattr(torch, "abacus", None) is not None:
        return
    torch.ops.load_library(LIBRARY)
    torch.utils.rename_privateuse1_backend("abacus")

    from torch_abacus import device, group

    torch._register_device_module("abacus", device)
    sys.modules["torch.abacus"] = device
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    group.register()
