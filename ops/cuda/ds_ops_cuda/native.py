"""The compiled module, and the way to call it: the tensors' device made current, and torch's stream
on it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from ds_kernel_kit import build

from ds_core.errors import KernelError
from ds_ops_cuda.extension import EXTENSION

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
NONE = 4
DEVICE = "cuda"

_native: ModuleType | None = None


def native() -> ModuleType:
    """The compiled module, built now if it never was."""
    global _native
    if _native is None:
        module = build.load(EXTENSION)
        driver, runtime = module.versions()
        if driver // 1000 < runtime // 1000:  # within one major version older drivers serve
            has = f"is for CUDA {_version(driver)}" if driver else "is missing"
            raise KernelError(
                f"dscore-ops-cuda was built with CUDA {_version(runtime)}, and the driver {has}; "
                "update the driver, or set CUDA_HOME to a toolkit of CUDA "
                f"{torch.version.cuda or 'your driver'}"
            )
        _native = module
    return _native


def serves(device: torch.device) -> bool:
    """Whether tensors on `device` are this package's to work on."""
    return device.type == DEVICE


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def call(name: str, device: torch.device, *arguments: Any) -> None:
    """Queue the function `name` of the module on torch's current stream of `device`."""
    function = getattr(native(), name)
    # Kernels are queued on the device that is current, which need not be the tensors'.
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
        function(index, torch.cuda.current_stream(index).cuda_stream, *arguments)


def processors(device: torch.device) -> int:
    """How many streaming multiprocessors the device has."""
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def graph(device: torch.device, work: Callable[[], None]) -> Callable[[], None]:
    """Record what `work` queues on the device as a CUDA graph, without running it; the function
    that runs it.
    """
    with torch.cuda.device(device):
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            work()
    return recorded.replay
