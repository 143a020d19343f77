"""What ``dscore-moe`` compiles (torch-free); see `ds_kernel_kit.build`."""

from __future__ import annotations

import sys
from pathlib import Path

from ds_kernel_kit.build import Extension, Unit

# Apple's compiler has none: one thread there
_OPENMP = () if sys.platform == "darwin" else ("-fopenmp",)

EXTENSION = Extension(
    name="dscore-moe",
    module="_ds_moe",
    folder=Path(__file__).parents[1] / "cpp",
    units=(Unit("ffn.cpp", _OPENMP),),
    # Sums and products may be one instruction: nothing here promises the bits of another
    # implementation.
    flags=(
        "-std=c++17",
        "-O3",
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-math-errno",
        "-fno-trapping-math",
        "-Wno-psabi",
    ),
    link=("-shared", *_OPENMP),
)
