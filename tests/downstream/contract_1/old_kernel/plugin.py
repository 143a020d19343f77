"""The declaration of old-kernel: a provider of a kernel (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable

from ds_core.entries import KernelEntry


def ds_kernels() -> Iterable[KernelEntry]:
    """The highest available priority serves: by convention cuda 30, triton 20, cpp 10, the reference 0."""
    return [
        KernelEntry(
            "squared_norm",
            provider="old_kernel",
            load="old_kernel.kernel:squared_norm",
            priority=5,
            devices=("cpu",),
            dtypes=("float32",),
        )
    ]
