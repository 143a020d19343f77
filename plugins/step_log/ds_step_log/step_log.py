"""`StepLog`: what is printed of a run's steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ds_step_log.clocks import PhaseTimers, ThroughputClock
from ds_step_log.config import Timers

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.running import RunningEngine

__all__ = ["StepLog", "log"]

log = logging.getLogger("ds_core.engine")
BREAKDOWN_EVERY = 10
"""Steps between breakdowns when ``steps_per_print`` is not set."""


class StepLog:
    """The progress lines and phase timings of one engine."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._timed, self._memory = bool(self._key("wall_clock_breakdown")), bool(self._key("memory_breakdown"))
        measured = self._timed or self._memory
        self._timers = PhaseTimers(ctx.accelerator, breakdown=self._memory) if measured else None
        section = ctx.config.section("timers")
        throughput = (section if isinstance(section, Timers) else Timers()).throughput
        self._throughput = ThroughputClock(ctx.accelerator, throughput.synchronized) if throughput.enabled else None
        # Breakdowns are asked for to be read, so they are printed even when no period is given.
        period = self._key("steps_per_print")
        self._every = period or (BREAKDOWN_EVERY if measured else 0)
        self._print_first = measured and not period

    def _key(self, name: str) -> Any:
        section: Any = self._ctx.config.section(name)
        return None if section is None else section.root

    @property
    def prints(self) -> bool:
        """Whether anything will be printed."""
        return bool(self._every)

    def phase_begin(self, phase: str) -> None:
        """See `ds_phase_begin`."""
        if self._timers is not None:
            self._timers.begin(phase)

    def phase_end(self, phase: str) -> None:
        """See `ds_phase_end`."""
        if self._timers is not None:
            self._timers.end(phase)

    def step_end(self, engine: RunningEngine, metrics: Mapping[str, float]) -> None:
        """Print what is due, and give monitors the timings."""
        timings = self._timers.end_step() if self._timers is not None else None
        timings = timings if self._timed else None
        monitor = self._ctx.engine.monitor
        if timings is not None and monitor.enabled:
            x = engine.global_samples
            monitor.write_events([(f"Train/Samples/elapsed_time_ms_{phase}", ms, x) for phase, ms in timings.items()])
        first = engine.global_steps == 1 and self._print_first
        if self._ctx.rank == 0 and (first or (self._every and engine.global_steps % self._every == 0)):
            self._print(engine, metrics, timings)

    def _print(self, engine: RunningEngine, metrics: Mapping[str, float], timings: Mapping[str, float] | None) -> None:
        parts = [f"step {engine.global_steps}", f"skipped {engine.skipped_steps}"]
        momentum = [g["momentum"] if "momentum" in g else g.get("betas") for g in engine.param_groups()]
        parts += [f"lr {engine.get_lr()}", f"mom {momentum}"]
        if "loss" in metrics:
            parts.insert(1, f"loss {metrics['loss']:.4f}")
        if self._throughput is not None:
            parts.append(f"{self._throughput.read(engine.global_samples):.1f} samples/s")
        if timings is not None:
            parts.append("ms: " + ", ".join(f"{phase} {ms:.1f}" for phase, ms in timings.items()))
        log.info(", ".join(parts))
        if self._memory and self._timers is not None:
            gib = 2.0**30
            for phase, (used, peak) in self._timers.memory.items():
                log.info("memory after %s: %.2f GiB in use, %.2f GiB at peak", phase, used / gib, peak / gib)
            log.info("memory: %.2f GiB free", self._ctx.accelerator.available_memory() / gib)
