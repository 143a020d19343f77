"""Phase timings and throughput: `wall_clock_breakdown`, `memory_breakdown` and `timers.throughput`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_core.accelerator import Accelerator

__all__ = ["PhaseTimers", "ThroughputClock"]

PHASES = ("forward", "backward", "backward_inner", "backward_allreduce", "step")


class PhaseTimers:
    """Milliseconds per phase, summed over the micro-batches of one optimizer step; each phase is synchronised.

    memory: with `breakdown`, the bytes in use and at peak when each phase last ended.
    """

    def __init__(self, accelerator: Accelerator, *, breakdown: bool = False) -> None:
        self._accelerator = accelerator
        self._now = dict.fromkeys(PHASES, 0.0)
        self._breakdown = breakdown
        self._starts: dict[str, float] = {}
        self.memory: dict[str, tuple[int, int]] = {}

    def begin(self, phase: str) -> None:
        """A phase begins, perhaps inside another."""
        self._accelerator.synchronize()
        self._starts[phase] = time.perf_counter()

    def end(self, phase: str) -> None:
        """Add the time since `begin` to the phase."""
        self._accelerator.synchronize()
        self._now[phase] += (time.perf_counter() - self._starts[phase]) * 1e3
        if self._breakdown:
            self.memory[phase] = self._accelerator.memory_allocated(), self._accelerator.max_memory_allocated()

    def end_step(self) -> dict[str, float]:
        """The milliseconds of the step that ends here; the next starts at zero."""
        last, self._now = self._now, dict.fromkeys(PHASES, 0.0)
        return last


class ThroughputClock:
    """Samples per second over all ranks between two readings."""

    def __init__(self, accelerator: Accelerator, synchronized: bool) -> None:
        self._accelerator, self._synchronized = accelerator, synchronized
        self._samples, self._start = 0, time.perf_counter()

    def read(self, samples: int) -> float:
        """The rate since the last reading; `samples` counts all samples so far."""
        if self._synchronized:
            self._accelerator.synchronize()
        now = time.perf_counter()
        rate = (samples - self._samples) / max(now - self._start, 1e-9)
        self._samples, self._start = samples, now
        return rate
