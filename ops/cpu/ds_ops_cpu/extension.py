"""What ``ds-ops-cpu`` compiles (torch-free); see `ds_kernel_kit.build`."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from ds_kernel_kit.build import Extension, Unit, why_not

__all__ = ["EXTENSION", "available", "can_share"]

_X86 = platform.machine().lower() in ("x86_64", "amd64")
_OPENMP = () if sys.platform == "darwin" else ("-fopenmp",)  # Apple's compiler has none: one thread there
# Products and sums keep their own roundings (the kernels say where they are to be one); errno and traps are not used.
_EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")

EXTENSION = Extension(
    name="ds-ops-cpu",
    module="_ds_ops_cpu",
    folder=Path(__file__).parent / "cpp",
    units=(
        Unit("module.cpp", _OPENMP),
        Unit("shared.cpp", ("-O1",)),
        Unit("generic.cpp"),
        *(
            (
                Unit("avx2.cpp", ("-mavx2", "-mfma", "-mf16c")),
                Unit(
                    "avx512.cpp",
                    ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c"),
                ),
            )
            if _X86
            else ()
        ),
    ),
    flags=("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", *_EXACT),
    link=("-shared", *_OPENMP),
    prebuilt=Path(__file__).parent / "prebuilt",
)


def available() -> str | None:
    """None when the kernels are built or can be, else what is missing."""
    return why_not(EXTENSION)


def can_share() -> str | None:
    """None when ranks on one host may share memory; whether they are on one is seen when they meet."""
    return "needs Linux" if sys.platform != "linux" else available()
