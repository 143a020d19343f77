"""Declares the CPU kernels (torch-free): priority 10, for 32- and 16-bit floats on the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ds_core.entries import CollectivesEntry, KernelEntry

OPS = (
    "accumulate",
    "adagrad",
    "adam",
    "dequantize",
    "dequantize_sum",
    "lamb",
    "lion",
    "quantize",
    "requantize_sum",
    "sgd",
    "squared_norm",
)
DTYPES = ("float32", "bfloat16", "float16")


def ds_kernels() -> Iterable[KernelEntry]:
    """One provider, ``cpp``, of each operation; built on first use."""
    steps = tuple(
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
    programs = KernelEntry(
        "inference_program",
        "cpp",
        "ds_ops_cpu.programs:load",
        10,
        devices=("cpu",),
        dtypes=DTYPES,
        available="ds_ops_cpu.extension:can_infer",
        build="ds_ops_cpu.extension:INFERENCE",
        check="ds_inference_kit.checks:inference_program",
    )
    return *steps, programs


def ds_collectives() -> Mapping[str, CollectivesEntry]:
    """``shm``, for the ranks of one host; built on first use."""
    return {
        "shm": CollectivesEntry(
            "ds_ops_cpu.shared:collectives",
            device="cpu",
            backend="gloo",
            priority=10,
            available="ds_ops_cpu.extension:can_share",
            build="ds_ops_cpu.extension:EXTENSION",
        )
    }
