"""`StepLog`: what is printed of a run's steps, and the metrics that monitors get of them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, SupportsFloat

from ds_step_log.clocks import PHASES, Later, StepClock, StepTimes, Totals
from ds_step_log.config import (
    MemoryBreakdown,
    MemorySnapshot,
    StepsPerPrint,
    Timers,
    WallClockBreakdown,
)
from ds_step_log.memory import GIB, PhaseMemory, Used
from ds_step_log.snapshot import Snapshot
from ds_step_log.tokens import count_tokens

if TYPE_CHECKING:
    from pydantic import RootModel

    from ds_core.context import Context
    from ds_core.engine import RunningEngine

log = logging.getLogger("ds_core.engine")
BREAKDOWN_EVERY = 10
LOOK_EVERY = 0.1
"""Steps between breakdowns when ``steps_per_print`` is not set; seconds between looks at memory for
monitors.
"""


class StepLog:
    """The progress lines, times and memory of one engine's steps.

    A forward in evaluation mode is no part of a step. Tokens are counted on the ranks that are
    given the inputs.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._timed = bool(self._key(WallClockBreakdown))
        self._prints_memory = bool(self._key(MemoryBreakdown))
        chosen = ctx.config.section(MemorySnapshot)
        self.snapshot = Snapshot(ctx, chosen) if chosen is not None and chosen.enabled else None
        self._memory = (
            PhaseMemory(ctx.accelerator)
            if self._prints_memory or self.snapshot is not None
            else None
        )
        measured = self._timed or self._prints_memory
        section = ctx.config.section(Timers)
        self._throughput = (section if section is not None else Timers()).throughput
        new_event = (
            ctx.accelerator.new_event
            if self._throughput.synchronized or self._timed
            else _host_event
        )
        self._clock = StepClock(new_event, phases=self._timed)
        self._totals = Totals()
        self._tokens: int | None = None
        # The counters of the engine when a step was taken last.
        self._step = 0
        self._samples = 0
        self._last: StepTimes | None = None
        self._used: dict[str, Used] = {}
        # Breakdowns are asked for to be read, so they are printed even when no period is given.
        period = self._key(StepsPerPrint)
        self._every = period or (BREAKDOWN_EVERY if measured else 0)
        self._print_first = measured and not period
        self._counts_tokens = (
            self._throughput.enabled and self._throughput.tokens_per_sample is None
        )
        self._asked = False  # how it listens, once before
        self._training = True
        # What looks at memory in the step that runs, and for which step that was decided.
        self._watched: PhaseMemory | None = None
        self._decided = -1
        self._looked = -math.inf
        self._allocated = self._peak = 0

    def _key(self, key: type[RootModel[Any]]) -> Any:
        section = self._ctx.config.section(key)
        return None if section is None else section.root

    @property
    def prints(self) -> bool:
        """Whether anything will be printed."""
        return bool(self._every)

    def listens(self) -> dict[str, int]:
        """See `ds_listens`: every step for what is summed up over all, else only those that are
        printed.
        """
        # the first step is over, and the model is given no tokens
        if self._asked and self._tokens is None:
            self._counts_tokens = False
        self._asked = True
        printed = 1 if self._print_first or self.snapshot is not None else self._every
        watched = printed if self._memory is not None else 0
        ends = 1 if self._timed else watched
        # Tokens are counted where a forward begins.
        begins = 1 if self._counts_tokens else ends
        return {"ds_phase_begin": begins, "ds_phase_end": ends, "ds_step_end": printed}

    # -- events of a step --------------------------------------------------------------------------

    def phase_begin(self, phase: str, inputs: Any) -> None:
        """See `ds_phase_begin`; evaluation is no part of a step."""
        if phase == "eval":
            self._clock.pause()
            return
        if phase == "forward":
            self._training = self._ctx.engine.module.training
        if not self._training:
            return
        if self._counts_tokens and inputs is not None:
            count = count_tokens(inputs)
            self._tokens = self._tokens if count is None else (self._tokens or 0) + count
        if self._timed:
            self._clock.begin(phase)
        if self._memory is not None:
            step = self._ctx.engine.global_steps + 1
            if step != self._decided:
                self._decided = step
                self._watched = self._memory if self._is_read(step) else None
            if self._watched is not None:
                self._watched.begin()

    def phase_end(self, phase: str) -> None:
        """See `ds_phase_end`."""
        if phase == "eval":
            self._clock.resume()
        elif self._training:
            if self._watched is not None:
                self._watched.end(phase)
            self._clock.end(phase)
        elif phase == "forward":
            self._training = True

    def metrics(self, engine: RunningEngine) -> dict[str, SupportsFloat]:
        """The step that is over, for monitors: where not every step is read, the mean of those
        since the last one.

        Times are read when they are asked for.
        """
        self._end_step(engine)
        step = self._last
        found: dict[str, SupportsFloat] = {}
        if step is None:
            return found
        if self._throughput.enabled:
            found["step_time_ms"] = Later(lambda: step.milliseconds() / step.steps)
            found["samples_per_second"] = Later(lambda: step.samples * 1e3 / step.milliseconds())
            if (tokens := step.tokens) is not None:
                found["tokens_per_second"] = Later(lambda: tokens * 1e3 / step.milliseconds())
        if self._timed:
            found |= {
                f"elapsed_time_ms_{phase}": Later(partial(step.mean_of_phase, phase))
                for phase in PHASES
            }
        self._look_at_memory()
        found |= {
            "memory_allocated_gib": self._allocated / GIB,
            "memory_peak_gib": self._peak / GIB,
        }
        return {f"Train/Samples/{name}": value for name, value in found.items()}

    def _look_at_memory(self) -> None:
        """At most every `LOOK_EVERY` seconds: to ask for it takes up to 0.1 ms."""
        if (now := time.monotonic()) - self._looked >= LOOK_EVERY:
            accelerator = self._ctx.accelerator
            self._looked = now
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

    def checkpoint_loaded(self, engine: RunningEngine) -> None:
        """The counters are the checkpoint's now: what lies between is no step of this process."""
        self._step = engine.global_steps
        self._samples = engine.global_samples

    def _end_step(self, engine: RunningEngine) -> None:
        """Take the steps that are over since this was called last: one, or a period of those that
        nobody read.
        """
        steps = engine.global_steps - self._step
        if steps == 0:
            return
        samples = engine.global_samples - self._samples
        if steps < 0 or samples < 0:  # the program has set the counters
            steps = 1
            samples = engine.train_batch_size()
        self.checkpoint_loaded(engine)
        self._last = self._clock.end_step(steps, samples, self._all_tokens(samples))
        self._tokens = None
        if self.prints and self._ctx.rank == 0:
            self._totals.add(self._last)
        if self._watched is not None:
            self._used = self._watched.end_step()

    def _is_read(self, step: int) -> bool:
        """Whether anybody will read the memory of this step; it is not looked at in others."""
        return self.snapshot is not None or (
            self._prints_memory and self._ctx.rank == 0 and self._is_due(step)
        )

    def _is_due(self, step: int) -> bool:
        return (step == 1 and self._print_first) or bool(self._every and step % self._every == 0)

    def _all_tokens(self, samples: int) -> int | None:
        """Those of all ranks: each data-parallel rank is given as many as this one."""
        if (each := self._throughput.tokens_per_sample) is not None:
            return each * samples
        return None if self._tokens is None else self._tokens * self._ctx.mesh.size("batch")

    # -- printing ----------------------------------------------------------------------------------

    def _print(self, engine: RunningEngine, metrics: Mapping[str, float]) -> None:
        parts = [f"step {engine.global_steps}", f"skipped {engine.skipped_steps}"]
        momentum = [
            g["momentum"] if "momentum" in g else g.get("betas") for g in engine.param_groups()
        ]
        parts += [f"lr {engine.get_lr()}", f"mom {momentum}"]
        if "loss" in metrics:
            parts.insert(1, f"loss {float(metrics['loss']):.4f}")
        read = self._totals.read()
        if self._throughput.enabled:
            parts.append(f"{read.samples:.1f} samples/s")
            parts += [f"{read.tokens:.0f} tokens/s"] if read.tokens is not None else []
        if self._timed:
            parts.append(
                "ms: " + ", ".join(f"{phase} {ms:.1f}" for phase, ms in read.phases.items())
            )
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


def dump(ctx: Context) -> None:
    """Log the run's whole configuration."""
    config = ctx.config
    mesh = ctx.mesh
    plugins = ctx.plugins
    parts = (
        config.redacted(),
        mesh.describe(),
        ctx.batch,
        ctx.precision,
        plugins.loaded_versions(),
    )
    log.info("config %s, mesh %s, batch %s, precision %s, plugins %s", *parts)
