"""``deepspeed.utils.timer``: wall-clock timers that wait for the device (loads torch when a timer
is made).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

from ds_deepspeed_compat.utils.logs import log_dist


def trim_mean(data: Sequence[float], trim_percent: float) -> float:
    """The mean without the lowest and highest `trim_percent` (0 to 1); where none is left the
    median, of nothing 0.
    """
    if not 0.0 <= trim_percent <= 1.0:
        raise ValueError(f"trim_percent is {trim_percent}; it is between 0 and 1")
    if not data:
        return 0.0
    cut = round(len(data) * trim_percent)
    kept = sorted(data)[cut : len(data) - cut]
    return statistics.mean(kept) if kept else statistics.median(data)


def _now(synchronized: bool = True) -> float:
    """Seconds, once the device has finished."""
    if not synchronized:
        return time.perf_counter()
    from ds_core.accelerator import get_accelerator

    get_accelerator().synchronize()
    return time.perf_counter()


class SynchronizedWallClockTimer:
    """Named timers: ``timers("forward").start()``, ``.stop()``, and `log`."""

    class Timer:
        """One timer; times of several starts and stops add up until `reset`."""

        def __init__(self, name: str) -> None:
            self.name_ = name
            self.started_ = False
            self.elapsed_records: list[float] = []  # seconds
            self._began = 0.0

        def start(self) -> None:
            """Begin; RuntimeError when it runs already."""
            if self.started_:
                raise RuntimeError(f"timer {self.name_!r} runs already; stop it first")
            self._began = _now()
            self.started_ = True

        def stop(self, reset: bool = False, record: bool = False) -> None:
            """End; RuntimeError when it does not run."""
            if not self.started_:
                raise RuntimeError(f"timer {self.name_!r} does not run; start it first")
            took = _now() - self._began
            self.elapsed_records = [took] if reset else [*self.elapsed_records, took]
            self.started_ = False

        def reset(self) -> None:
            """Forget all times."""
            self.started_ = False
            self.elapsed_records = []

        def elapsed(self, reset: bool = True) -> float:
            """Milliseconds in all; a timer that runs goes on."""
            running = self.started_
            if running:
                self.stop()
            total = sum(self.elapsed_records) * 1000
            if reset:
                self.reset()
            if running:
                self.start()
            return total

        def mean(self) -> float:
            """Milliseconds of one start and stop on average."""
            return sum(self.elapsed_records) * 1000 / max(1, len(self.elapsed_records))

    def __init__(self) -> None:
        self.timers: dict[str, SynchronizedWallClockTimer.Timer] = {}

    def __call__(self, name: str) -> Timer:
        """The timer `name`, made when it is first asked for."""
        return self.timers.setdefault(name, self.Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        """All timers by name."""
        return self.timers

    @staticmethod
    def memory_usage() -> str:
        """Memory in use and at peak, as text."""
        from ds_core.accelerator import get_accelerator

        device = get_accelerator()
        gib = 1024**3
        used = device.memory_allocated() / gib
        peak = device.max_memory_allocated() / gib
        return f" | mem_allocated: {used:.4f} GB | max_mem_allocated: {peak:.4f} GB"

    def has_timer(self, name: str) -> bool:
        """Whether there is a timer of this name."""
        return name in self.timers

    def log(
        self,
        names: Sequence[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Log the times of `names` in milliseconds, divided by `normalizer`; by default on rank
        0."""
        shown = (
            f"{n}: {self.timers[n].elapsed(reset) / normalizer:.2f}"
            for n in names
            if n in self.timers
        )
        used = self.memory_usage() if memory_breakdown else ""
        log_dist(f"time (ms) | {' | '.join(shown)}{used}", ranks=ranks or [0])

    def get_mean(
        self, names: Sequence[str], normalizer: float = 1.0, reset: bool = True
    ) -> dict[str, float]:
        """The mean time of each of `names` in milliseconds, divided by `normalizer`."""
        means = {n: self.timers[n].mean() / normalizer for n in names if n in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means


class NoopTimer:
    """Timers that do nothing."""

    class Timer:
        """One of them."""

        def start(self) -> None:
            """Nothing."""

        def stop(self, **_: Any) -> None:
            """Nothing."""

        def reset(self) -> None:
            """Nothing."""

        def elapsed(self, **_: Any) -> float:
            """0."""
            return 0.0

        mean = elapsed

    def __init__(self) -> None:
        self.timer = self.Timer()

    def __call__(self, name: str) -> Timer:
        """One that does nothing."""
        return self.timer

    def get_timers(self) -> dict[str, Any]:
        """None."""
        return {}

    def log(self, names: Sequence[str], **_: Any) -> None:
        """Nothing."""


class ThroughputTimer:
    """Samples per second of whole steps, the first `start_step` of which do not count.

    config: of it `enabled` and `synchronized` are read, which are true where it has none; without
    the latter nothing waits for the device, and the times of many steps are right together.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Any = None,
    ) -> None:
        self.config = config
        self.batch_size = max(1, batch_size)
        self.start_step = start_step
        self.steps_per_output = steps_per_output
        self.logging = logging_fn or log_dist
        self.epoch_count = 0
        self.global_step_count = 0
        self.micro_step_count = 0
        self.total_elapsed_time = 0.0  # seconds, of the steps that count
        self.step_elapsed_time = 0.0  # seconds, of the step that runs
        self.started = False
        self._began = 0.0
        self._enabled = bool(getattr(config, "enabled", True))
        self._synchronized = bool(getattr(config, "synchronized", True))

    def update_epoch_count(self) -> None:
        """An epoch has ended."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """A step, or a micro-step, begins."""
        if self._enabled and not self.started:
            self._began = _now(self._synchronized)
            self.started = True

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """A micro-step ends, and with `global_step` a whole one."""
        if not self.started:
            return
        self.started = False
        self.micro_step_count += 1
        self.step_elapsed_time += _now(self._synchronized) - self._began
        if not global_step:
            return
        took = self.step_elapsed_time
        self.step_elapsed_time = 0.0
        self.global_step_count += 1
        if self.global_step_count <= self.start_step:
            return
        self.total_elapsed_time += took
        due = self.steps_per_output and self.global_step_count % self.steps_per_output == 0
        if report_speed and due:
            self.logging(
                f"step {self.global_step_count}: {self.avg_samples_per_sec():.2f} samples/s"
            )

    def avg_samples_per_sec(self) -> float:
        """Samples per second since the steps that do not count; -inf before."""
        counted = self.global_step_count - self.start_step
        return counted * self.batch_size / self.total_elapsed_time if counted > 0 else -math.inf
