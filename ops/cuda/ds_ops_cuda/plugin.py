"""Declares the CUDA kernels (torch-free): priority 30, for 32- and 16-bit floats; and this
package's own operations.
"""

from __future__ import annotations

from collections.abc import Iterable

from ds_core.entries import KernelEntry

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
PROGRAM = "inference_program"
FUSED = ("bias_dropout_add", "bias_gelu", "layer_norm", "softmax_dropout")
DTYPES = ("float32", "bfloat16", "float16")


def ds_kernels() -> Iterable[KernelEntry]:
    """One provider, ``cuda``, of each operation, built on its first use; references of those that
    the core lacks.
    """
    places = {op: f"ds_ops_cuda.kernels:{op}" for op in OPS} | {
        op: f"ds_ops_cuda.fused:{op}" for op in FUSED
    }
    compiled = (
        KernelEntry(
            op,
            "cuda",
            place,
            30,
            devices=("cuda",),
            dtypes=(*DTYPES, "float64") if op == "squared_norm" else DTYPES,
            available="ds_ops_cuda.extension:available",
            build="ds_ops_cuda.extension:EXTENSION",
            check=f"ds_ops_cuda.checks:{op}" if op in FUSED else None,
        )
        for op, place in places.items()
    )
    program = KernelEntry(
        PROGRAM,
        "cuda",
        "ds_ops_cuda.inference.programs:load",
        30,
        devices=("cuda",),
        dtypes=DTYPES,
        available="ds_ops_cuda.extension:available",
        build="ds_ops_cuda.extension:EXTENSION",
        check="ds_inference_kit.checks:inference_program",
    )
    references = (KernelEntry(op, "reference", f"ds_ops_cuda.references:{op}", 0) for op in FUSED)
    return (*compiled, program, *references)
