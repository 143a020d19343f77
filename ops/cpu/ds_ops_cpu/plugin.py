"""Declares the CPU kernels (torch-free): priority 10, for 32- and 16-bit floats on the CPU."""

from __future__ import annotations

from collections.abc import Iterable

from ds_core.entries import KernelEntry

__all__ = ["ds_kernels"]

OPS = ("accumulate", "adagrad", "adam", "dequantize", "lamb", "lion", "quantize", "sgd", "squared_norm")
DTYPES = ("float32", "bfloat16", "float16")


def ds_kernels() -> Iterable[KernelEntry]:
    """One provider, ``cpp``, of each operation, and the collectives of ranks on one host; built on first use."""
    shared = KernelEntry(
        "collectives",
        "shm",
        "ds_ops_cpu.shared:open_segment",
        10,
        devices=("cpu",),
        available="ds_ops_cpu.extension:can_share",
        build="ds_ops_cpu.extension:EXTENSION",
        check="ds_testing.transports:comparisons",
    )
    return shared, *(
        KernelEntry(
            op,
            "cpp",
            f"ds_ops_cpu.kernels:{op}",
            10,
            devices=("cpu",),
            dtypes=(*DTYPES, "float64") if op == "squared_norm" else DTYPES,
            available="ds_ops_cpu.extension:available",
            build="ds_ops_cpu.extension:EXTENSION",
        )
        for op in OPS
    )
