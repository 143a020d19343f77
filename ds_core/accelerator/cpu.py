"""The CPU: one device, one stream, memory as the operating system counts it."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

import torch
from torch import Tensor

from ds_core.accelerator import Accelerator
from ds_core.errors import AcceleratorError


class CpuAccelerator(Accelerator):
    """The host's processor; ranks communicate over gloo."""

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
        return torch.device("cpu")

    def synchronize(self) -> None:
        return

    def memory_allocated(self) -> int:
        """The process's resident set size; tensors alone are not counted."""
        return _kib("/proc/self/status", "VmRSS") or _highest_resident()

    def max_memory_allocated(self) -> int:
        """The peak resident set size since the last reset, or since process start if it cannot be
        reset.
        """
        return _kib("/proc/self/status", "VmHWM") or _highest_resident()

    def reset_peak_memory_stats(self) -> None:
        # not permitted everywhere; the peak then counts from process start
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    def total_memory(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self) -> int:
        return _kib("/proc/meminfo", "MemAvailable") or super().available_memory()

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def get_rng_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def supports(self, dtype: torch.dtype) -> bool:
        """Torch's CPU operations exist in these four; fp8 is for storage only."""
        return dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _kib(path: str, key: str) -> int:
    """Bytes of a line like ``VmHWM:  1234 kB`` in a file of /proc; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(path).read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return 0


def _highest_resident() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
