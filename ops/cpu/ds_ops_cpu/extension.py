"""What ``dscore-ops-cpu`` compiles (torch-free); see `ds_kernel_kit.build`."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from ds_kernel_kit.build import Extension, Unit, why_not

_X86 = platform.machine().lower() in ("x86_64", "amd64")
# Apple's compiler has none: one thread there
_OPENMP = () if sys.platform == "darwin" else ("-fopenmp",)
# Products and sums keep their own roundings (the kernels say where they are to be one); errno and
# traps are not used.
_EXACT = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", *_EXACT)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", *_AVX2)


def _for_each_processor(folder: str = "") -> tuple[Unit, ...]:
    x86 = (Unit(f"{folder}avx2.cpp", _AVX2), Unit(f"{folder}avx512.cpp", _AVX512)) if _X86 else ()
    return Unit(f"{folder}generic.cpp"), *x86


EXTENSION = Extension(
    name="dscore-ops-cpu",
    module="_ds_ops_cpu",
    folder=Path(__file__).parent / "cpp",
    units=(
        Unit("module.cpp", _OPENMP),
        Unit("shared/collectives.cpp", ("-O1",)),
        *_for_each_processor(),
    ),
    flags=_FLAGS,
    link=("-shared", *_OPENMP),
    prebuilt=Path(__file__).parent / "prebuilt",
)

INFERENCE = Extension(
    name="dscore-ops-cpu-inference",
    module="_ds_ops_cpu_inference",
    folder=Path(__file__).parent / "cpp",  # its headers use those beside the other kernels
    units=(
        Unit("inference/module.cpp", _OPENMP),
        *_for_each_processor("inference/"),
        *(
            (Unit("inference/avx512bf16.cpp", (*_AVX512, "-mavx512bf16", "-mavx512vnni")),)
            if _X86
            else ()
        ),
    ),
    flags=_FLAGS,
    link=("-shared", *_OPENMP),
    prebuilt=Path(__file__).parent / "prebuilt" / "inference",
)


def available() -> str | None:
    """None when the kernels are built or can be, else what is missing."""
    return why_not(EXTENSION)


def can_infer() -> str | None:
    """None when inference programs can run in C++."""
    return why_not(INFERENCE)


def can_share() -> str | None:
    """None when ranks on one host may share memory; whether they are on one is seen when they
    meet."""
    return "needs Linux" if sys.platform != "linux" else available()
