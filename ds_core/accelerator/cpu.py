"""The CPU: one device, one queue of work, memory as the operating system counts it."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ds_core.accelerator.contract import Accelerator, BuildFlags
from ds_core.errors import AcceleratorError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["CpuAccelerator"]

# The processor's own words for arithmetic in bf16 (x86, then Arm); without it torch's bf16 is slower than its fp32.
_BF16_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16"))


class CpuAccelerator(Accelerator):
    """Ranks on the host's cores, talking over gloo."""

    name = "cpu"
    device_type = "cpu"
    communication_backend = "gloo"

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None:
        if index != 0:
            raise AcceleratorError(f"cpu has 1 device, number 0; there is no number {index}")

    def current_index(self) -> int:
        return 0

    def device(self, index: int | None = None) -> torch.device:
        """Without an index: a tensor's own device is ``cpu``, and ``cpu:0`` does not equal it."""
        import torch

        return torch.device("cpu")

    def device_name(self, index: int | None = None) -> str:
        """``"cpu"``, whatever the index: a tensor's own device is ``cpu``, and ``cpu:0`` does not equal it."""
        return "cpu"

    def synchronize(self, index: int | None = None) -> None:
        return

    def memory_allocated(self, index: int | None = None) -> int:
        """The process's resident set: the host has no count of tensors alone."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return _highest_resident()

    def max_memory_allocated(self, index: int | None = None) -> int:
        """The highest resident set since the last reset, or of the whole process where it cannot be reset."""
        return _kib("/proc/self/status", "VmHWM") or _highest_resident()

    def reset_peak_memory_stats(self, index: int | None = None) -> None:
        with contextlib.suppress(OSError):  # not permitted everywhere; the peak is then the whole process's
            Path("/proc/self/clear_refs").write_text("5")

    def total_memory(self, index: int | None = None) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, index: int | None = None) -> int:
        return _kib("/proc/meminfo", "MemAvailable") or super().available_memory()

    def manual_seed(self, seed: int) -> None:
        import torch

        torch.manual_seed(seed)

    def get_rng_state(self, index: int | None = None) -> Tensor:
        import torch

        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, index: int | None = None) -> None:
        import torch

        torch.set_rng_state(state)

    def supports(self, dtype: torch.dtype) -> bool:
        """Torch's CPU operations exist in these four; fp8 is for storage only."""
        import torch

        return dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def preferred_dtype(self) -> torch.dtype:
        """bf16 where the processor has instructions for it, else fp32."""
        import torch

        flags = _cpuinfo("flags") or _cpuinfo("Features")
        return torch.bfloat16 if _BF16_FLAGS & set(flags.split()) else torch.float32

    def build_flags(self) -> BuildFlags:
        """For this very processor: what was built may not run on another, so a cache must know the machine."""
        openmp = ("-fopenmp",) if sys.platform == "linux" else ()
        return BuildFlags(("-O3", "-march=native", *openmp), link=openmp, architectures=(platform.machine(),))


def _line(path: str, key: str) -> str:
    """What stands behind ``key:`` in one of the kernel's files; "" where there is no such file or line."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text().splitlines():
            head, _, tail = line.partition(":")
            if head.strip() == key:
                return tail.strip()
    return ""


def _cpuinfo(key: str) -> str:
    return _line("/proc/cpuinfo", key)


def _kib(path: str, key: str) -> int:
    """Bytes of a line like ``VmHWM:  1234 kB``; 0 where there is none."""
    text = _line(path, key).split()
    return int(text[0]) * 1024 if text and text[0].isdecimal() else 0


def _highest_resident() -> int:
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
