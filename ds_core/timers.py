"""Phase timings and throughput: `wall_clock_breakdown`, `memory_breakdown` and `timers.throughput`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_core.accelerator import Accelerator

__all__ = ["PhaseTimers", "Throughput"]

PHASES = ("forward", "backward", "backward_inner", "backward_allreduce", "step")


class PhaseTimers:
    """Milliseconds per phase, summed over the micro-batches of one optimizer step; each phase is synchronised.

    memory: with `breakdown`, the bytes in use and at peak when each phase last ended.
    """

    def __init__(self, accelerator: Accelerator, *, breakdown: bool = False) -> None:
        self._accelerator = accelerator
        self._now = dict.fromkeys(PHASES, 0.0)
        self._breakdown = breakdown
        self.last = dict(self._now)
        self.memory: dict[str, tuple[int, int]] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to phase `name`."""
        self._accelerator.synchronize()
        start = time.perf_counter()
        try:
            yield
        finally:
            self._accelerator.synchronize()
            self._now[name] += (time.perf_counter() - start) * 1e3
            if self._breakdown:
                self.memory[name] = self._accelerator.memory_allocated(), self._accelerator.max_memory_allocated()

    def end_step(self) -> dict[str, float]:
        """The milliseconds of the step that ends here; the next starts at zero."""
        self.last, self._now = self._now, dict.fromkeys(PHASES, 0.0)
        return self.last


class Throughput:
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
