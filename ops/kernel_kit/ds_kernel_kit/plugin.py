"""Declares the references, at priority 0 for any device and dtype, and the command ``dscore ops``
(torch-free).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ds_core.entries import CommandEntry, KernelEntry

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
)
"""Operations of which `ds_kernel_kit.references` defines the meaning."""


def ds_kernels() -> Iterable[KernelEntry]:
    """The references, which serve where no faster provider does."""
    return (
        KernelEntry("squared_norm", "reference", "ds_core.partition.params:squared_norm", 0),
        *(KernelEntry(op, "reference", f"ds_kernel_kit.references:{op}", 0) for op in OPS),
    )


def ds_commands() -> Mapping[str, CommandEntry]:
    """``dscore ops``."""
    return {
        "ops": CommandEntry("ds_kernel_kit.command:app", "List, build, check and time kernels.")
    }
