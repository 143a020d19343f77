"""What ``dscore-ops-cuda`` compiles, and whether it can run here (torch-free until a device is asked
for).

[Note: one library for every torch] The CUDA runtime is linked in statically: the library then needs
the driver alone, whatever runtime torch brings. Both share the device's one context, so torch's
addresses and streams are valid here.
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

from ds_kernel_kit.build import Extension, Unit, why_not

MIN_CAPABILITY = (8, 0)


def toolkit() -> Path | None:
    """The CUDA toolkit's folder: CUDA_HOME, CUDA_PATH, where nvcc is, /usr/local/cuda; the first
    with a runtime.
    """
    named = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    nvcc = shutil.which("nvcc")
    # What the user names goes first; nvcc's link is followed to its toolkit.
    candidates = [Path(n) for n in named if n] + ([Path(nvcc).resolve().parents[1]] if nvcc else [])
    for folder in [*candidates, Path("/usr/local/cuda")]:
        if _runtime(folder) is not None:
            return folder
    return None


def _runtime(folder: Path) -> Path | None:
    """The folder below `folder` with the static CUDA runtime."""
    places = ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib")
    return next((folder / p for p in places if (folder / p / "libcudart_static.a").exists()), None)


def _extension() -> Extension:
    home = toolkit()
    include = ("-isystem", f'"{home / "include"}"') if home else ()
    runtime = _runtime(home) if home else None
    search = (f'"-L{runtime}"',) if runtime else ()
    return Extension(
        name="dscore-ops-cuda",
        module="_ds_ops_cuda",
        folder=Path(__file__).parent / "cuda",
        units=(
            *(
                Unit("module.cpp", include),
                Unit("program.cpp"),
                Unit("steps.cu"),
                Unit("sums.cu"),
                Unit("rows.cu"),
            ),
            *(Unit("lines.cu"), Unit("products.cu"), Unit("attention.cu")),
        ),
        flags=("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden"),
        link=("-shared", *search, "-lcudart_static", "-ldl", "-lrt", "-lpthread"),
        # Code for sm_80 runs on all of 8.x; for chips after sm_90 the driver compiles the
        # intermediate form.
        cuda_flags=(
            *("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-fvisibility=hidden"),
            *("-gencode", "arch=compute_80,code=sm_80", "-gencode", "arch=compute_90,code=sm_90"),
            *("-gencode", "arch=compute_90,code=compute_90"),
        ),
    )


EXTENSION = _extension()


def available() -> str | None:
    """None when the kernels can serve here, else the reason: no GPU, one that is too old, or no way
    to build.
    """
    return _no_device() or why_not(EXTENSION)


@functools.cache
def _no_device() -> str | None:
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device; see nvidia-smi and CUDA_VISIBLE_DEVICES"
    found = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
    if min(found) < MIN_CAPABILITY:
        wanted, worst = (".".join(map(str, c)) for c in (MIN_CAPABILITY, min(found)))
        return (
            f"compute capability {wanted} is needed (A100 or later), and a device here has {worst}"
        )
    return None
