"""`StepLog`: what is printed of a run's steps, and the metrics that monitors get of them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, SupportsFloat

from ds_step_log.clocks import PHASES, Later, StepClock, StepTimes, Totals
from ds_step_log.config import MemorySnapshot, Timers
from ds_step_log.memory import GIB, PhaseMemory, Used
from ds_step_log.snapshot import Snapshot
from ds_step_log.tokens import count_tokens

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.running import RunningEngine

__all__ = ["StepLog", "log"]

log = logging.getLogger("ds_core.engine")
BREAKDOWN_EVERY, LOOK_EVERY = 10, 0.1
"""Steps between breakdowns when ``steps_per_print`` is not set; seconds between looks at memory for monitors."""


class StepLog:
    """The progress lines, times and memory of one engine's steps.

    A forward in evaluation mode is no part of a step. Tokens are counted on the ranks that are given the inputs.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._timed = bool(self._key("wall_clock_breakdown"))
        self._prints_memory = bool(self._key("memory_breakdown"))
        chosen = ctx.config.section("memory_snapshot")
        self.snapshot = Snapshot(ctx, chosen) if isinstance(chosen, MemorySnapshot) and chosen.enabled else None
        self._memory = PhaseMemory(ctx.accelerator) if self._prints_memory or self.snapshot is not None else None
        measured = self._timed or self._prints_memory
        section = ctx.config.section("timers")
        self._throughput = (section if isinstance(section, Timers) else Timers()).throughput
        new_event = ctx.accelerator.new_event if self._throughput.synchronized or self._timed else _host_event
        self._clock = StepClock(new_event, phases=self._timed)
        self._totals = Totals()
        self._tokens: int | None = None
        self._samples, self._step = 0, -1
        self._last: StepTimes | None = None
        self._used: dict[str, Used] = {}
        # Breakdowns are asked for to be read, so they are printed even when no period is given.
        period = self._key("steps_per_print")
        self._every = period or (BREAKDOWN_EVERY if measured else 0)
        self._print_first = measured and not period
        self._counts_tokens = self._throughput.enabled and self._throughput.tokens_per_sample is None
        self._training = True
        self._watched: PhaseMemory | Literal[False] | None = None  # in this step; None: not decided yet
        self._looked = -math.inf
        self._allocated = self._peak = 0

    def _key(self, name: str) -> Any:
        section: Any = self._ctx.config.section(name)
        return None if section is None else section.root

    @property
    def prints(self) -> bool:
        """Whether anything will be printed."""
        return bool(self._every)

    # -- events of a step ------------------------------------------------------------------------------------

    def phase_begin(self, phase: str, inputs: Any) -> None:
        """See `ds_phase_begin`."""
        if phase == "forward":
            self._training = self._ctx.engine.module.training
        if not self._training:
            return
        if self._counts_tokens and inputs is not None:
            count = count_tokens(inputs)
            self._tokens = self._tokens if count is None else (self._tokens or 0) + count
        self._clock.begin(phase)
        if self._watched is None:
            self._watched = (self._is_read(self._ctx.engine.global_steps + 1) and self._memory) or False
        if self._watched:
            self._watched.begin()

    def phase_end(self, phase: str) -> None:
        """See `ds_phase_end`."""
        if self._training:
            if self._watched:
                self._watched.end(phase)
            self._clock.end(phase)
        elif phase == "forward":
            self._training = True

    def eval_begin(self) -> None:
        """See `ds_eval_begin`."""
        self._clock.pause()

    def eval_end(self) -> None:
        """See `ds_eval_end`."""
        self._clock.resume()

    def metrics(self, engine: RunningEngine) -> dict[str, SupportsFloat]:
        """The step that is over, for monitors. Times are read when they are asked for."""
        self._end_step(engine)
        step, found = self._last, dict[str, SupportsFloat]()
        if step is None:
            return found
        if self._throughput.enabled:
            found["step_time_ms"] = Later(step.milliseconds)
            found["samples_per_second"] = Later(lambda: step.samples * 1e3 / step.milliseconds())
            if (tokens := step.tokens) is not None:
                found["tokens_per_second"] = Later(lambda: tokens * 1e3 / step.milliseconds())
        if self._timed:
            found |= {f"elapsed_time_ms_{phase}": Later(partial(step.phase, phase)) for phase in PHASES}
        self._look_at_memory()
        found |= {"memory_allocated_gib": self._allocated / GIB, "memory_peak_gib": self._peak / GIB}
        return {f"Train/Samples/{name}": value for name, value in found.items()}

    def _look_at_memory(self) -> None:
        """At most every `LOOK_EVERY` seconds: to ask for it takes up to 0.1 ms."""
        if (now := time.monotonic()) - self._looked >= LOOK_EVERY:
            accelerator, self._looked = self._ctx.accelerator, now
            self._allocated = accelerator.memory_allocated()
            self._peak = max(self._peak, self._allocated, accelerator.max_memory_allocated())
        if self._memory is not None:
            self._peak = max(self._peak, self._memory.highest)

    def step_end(self, engine: RunningEngine, metrics: Mapping[str, float]) -> None:
        """Print what is due."""
        self._end_step(engine)
        if self.snapshot is not None and self.snapshot.step_end(self._used):
            self.snapshot = None
            self._memory = self._memory if self._prints_memory else None
        if self._ctx.rank == 0 and self._is_due(engine.global_steps):
            self._print(engine, metrics)

    def _end_step(self, engine: RunningEngine) -> None:
        """Take the step that is over, once."""
        if self._step == engine.global_steps:
            return
        self._step, before, self._samples = engine.global_steps, self._samples, engine.global_samples
        samples = self._samples - before
        if samples < 0 or samples > engine.train_batch_size():  # a checkpoint was loaded in between
            samples = engine.train_batch_size()
        self._last = self._clock.end_step(samples, self._all_tokens(samples))
        self._tokens = None
        if self.prints and self._ctx.rank == 0:
            self._totals.add(self._last)
        if self._watched:
            self._used = self._watched.end_step()
        self._watched = None

    def _is_read(self, step: int) -> bool:
        """Whether anybody will read the memory of this step; it is not looked at in others."""
        return self.snapshot is not None or (self._prints_memory and self._ctx.rank == 0 and self._is_due(step))

    def _is_due(self, step: int) -> bool:
        return (step == 1 and self._print_first) or bool(self._every and step % self._every == 0)

    def _all_tokens(self, samples: int) -> int | None:
        """Those of all ranks: each data-parallel rank is given as many as this one."""
        if (each := self._throughput.tokens_per_sample) is not None:
            return each * samples
        return None if self._tokens is None else self._tokens * self._ctx.mesh.size("batch")

    # -- printing --------------------------------------------------------------------------------------------

    def _print(self, engine: RunningEngine, metrics: Mapping[str, float]) -> None:
        parts = [f"step {engine.global_steps}", f"skipped {engine.skipped_steps}"]
        momentum = [g["momentum"] if "momentum" in g else g.get("betas") for g in engine.param_groups()]
        parts += [f"lr {engine.get_lr()}", f"mom {momentum}"]
        if "loss" in metrics:
            parts.insert(1, f"loss {float(metrics['loss']):.4f}")
        read = self._totals.read()
        if self._throughput.enabled:
            parts.append(f"{read.samples:.1f} samples/s")
            parts += [f"{read.tokens:.0f} tokens/s"] if read.tokens is not None else []
        if self._timed:
            parts.append("ms: " + ", ".join(f"{phase} {ms:.1f}" for phase, ms in read.phases.items()))
        log.info(", ".join(parts))
        if self._prints_memory:
            for phase, used in self._used.items():
                host = f", {used.host / GIB:.2f} GiB of the host" if used.host else ""
                log.info(
                    "memory after %s: %.2f GiB in use, %.2f GiB at peak%s",
                    phase,
                    used.in_use / GIB,
                    used.peak / GIB,
                    host,
                )
            log.info("memory: %.2f GiB free", self._ctx.accelerator.available_memory() / GIB)


def _host_event(timing: bool) -> Any:
    """An event that waits for nothing: when work was queued, not when it was done."""
    from ds_core.accelerator import HostEvent

    return HostEvent(lambda: None)
