"""The CPU: one device, one queue of work, memory read from the operating system."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_core.accelerator.contract import Accelerator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["CpuAccelerator", "HostEvent"]


class HostEvent:
    """An event on a device that has done its work as soon as the call returns."""

    def __init__(self) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """The work is done already."""

    def synchronize(self) -> None:
        """The work is done already."""

    def query(self) -> bool:
        """Always done."""
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds until `end`."""
        return (end._time - self._time) * 1e3


class CpuAccelerator(Accelerator):
    """Ranks on the host's cores, talking over gloo."""

    name = "cpu"
    device_type = "cpu"
    communication_backend = "gloo"

    def __init__(self) -> None:
        self._peak_base = 0

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def set_device(self, index: int) -> None:
        if index != 0:
            raise ValueError(f"the cpu is one device, number 0; there is no {index}")

    def current_index(self) -> int:
        return 0

    def device(self, index: int | None = None) -> torch.device:
        import torch

        return torch.device("cpu")

    def device_name(self, index: int | None = None) -> str:
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
        return platform.processor() or platform.machine()

    def synchronize(self, index: int | None = None) -> None:
        return None

    def new_stream(self, priority: int = 0) -> None:
        return None

    def current_stream(self) -> None:
        return None

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def new_event(self, timing: bool = False) -> HostEvent:
        return HostEvent()

    def memory_allocated(self, index: int | None = None) -> int:
        """The process's resident set; the host has no count of tensors alone."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return self._highest()

    def _highest(self) -> int:
        import resource
        import sys

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def max_memory_allocated(self, index: int | None = None) -> int:
        """The highest resident set since the last reset, or of the whole process where it cannot be reset."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path("/proc/self/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return self._highest()

    def reset_peak_memory_stats(self, index: int | None = None) -> None:
        with contextlib.suppress(OSError):  # not permitted everywhere; the peak is then the whole process's
            Path("/proc/self/clear_refs").write_text("5")

    def memory_reserved(self, index: int | None = None) -> int:
        return self.memory_allocated()

    def total_memory(self, index: int | None = None) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, index: int | None = None) -> int:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path("/proc/meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return max(0, self.total_memory() - self.memory_allocated())

    def empty_cache(self) -> None:
        import gc

        gc.collect()

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
        import torch

        return dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
