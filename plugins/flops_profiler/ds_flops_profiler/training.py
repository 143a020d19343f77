"""The profile of one step of a run: what `FlopsProfiler` measures, the phases of the step, and all
ranks' sums.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ds_core import comm
from ds_flops_profiler import parameters, report
from ds_flops_profiler.config import FlopsProfilerConfig
from ds_flops_profiler.profiler import FlopsProfiler

if TYPE_CHECKING:
    from ds_core.context import Context

COUNTED = ("forward", "backward")
"""The phases in which operations are counted."""


def profile_of(ctx: Context) -> StepProfile | None:
    """The profile that the config asks for; None where it is off, or its step has passed."""
    section = ctx.config.section(FlopsProfilerConfig)
    if section is not None and section.enabled and ctx.engine.global_steps <= section.profile_step:
        return StepProfile(ctx, section)
    return None


class StepProfile:
    """Measures one step of the engine of `ctx`, over all its micro-batches."""

    def __init__(self, ctx: Context, section: FlopsProfilerConfig) -> None:
        self.step = section.profile_step
        self._ctx = ctx
        self._section = section
        self._profiler = FlopsProfiler(ctx.engine, ctx.engine, section.recompute_fwd_factor)
        self._seconds: dict[str, float] = defaultdict(float)
        self._starts: dict[str, float] = {}
        self._counting = contextlib.ExitStack()

    def begin(self, phase: str) -> None:
        """A phase of the step begins."""
        if phase == "eval" or (phase == "forward" and not torch.is_grad_enabled()):
            return  # an evaluation before the step
        if not self._profiler.started:
            self._profiler.attach()
        if phase in COUNTED:
            self._counting.enter_context(self._profiler.counter.measuring())
        self._starts[phase] = self._now()

    def end(self, phase: str) -> None:
        """The phase has ended."""
        if phase in self._starts:
            self._seconds[phase] += self._now() - self._starts.pop(phase)
            if phase in COUNTED:
                self._counting.close()

    def _now(self) -> float:
        self._ctx.accelerator.synchronize()
        return time.perf_counter()

    def finish(self) -> StepRate:
        """Print on rank 0; what later steps are measured by. Collective."""
        if not self._profiler.started:  # no forward here; others wait for this rank's numbers
            self._profiler.attach()
        self._profiler.stop_profile()
        everywhere = (
            comm.all_gather_json(self._measured())
            if self._ctx.world_size > 1
            else [self._measured()]
        )
        if self._ctx.rank == 0:
            section = self._section
            options = (
                self.step,
                section.module_depth,
                section.top_modules,
                section.detailed,
                section.output_file,
            )
            self._profiler.write(self._rows(everywhere), *options)
        self._profiler.end_profile()
        flops = sum(_of_the_model(row) for row in everywhere) / len(everywhere)
        return StepRate(self._ctx.batch.gas * flops / 1e12, self._section.peak_tflops)

    def _measured(self) -> dict[str, Any]:
        """What this rank tells the others: of one micro-batch, but for the step."""
        profiler = self._profiler
        gas = self._ctx.batch.gas
        profiler.counter.runs = gas
        total = profiler.total()
        counter = profiler.counter
        return {
            "place": dict(self._ctx.mesh.coord),
            "params": parameters.whole(profiler.model),
            "stored": parameters.stored_here(profiler.model),
            "summand": parameters.shared_of_all(self._ctx),
            "macs": total.macs,
            "flops": total.flops,
            "backward": counter.backward.flops,
            "recomputed": counter.recomputed.flops,
            "seconds": {
                phase: seconds / (1 if phase == "step" else gas)
                for phase, seconds in self._seconds.items()
            },
        }

    def _rows(self, everywhere: Sequence[Mapping[str, Any]]) -> report.Rows:
        ctx = self._ctx
        return [
            ("world size", str(ctx.world_size)),
            ("mesh", ", ".join(f"{name} {size}" for name, size in ctx.mesh.describe().items())),
            ("samples per micro-batch and rank", str(ctx.batch.micro)),
            ("micro-batches per step", str(ctx.batch.gas)),
            *report.of_training(everywhere, ctx.batch, self._profiler.recompute_fwd_factor),
        ]


def _of_the_model(row: Mapping[str, Any]) -> float:
    """FLOPs of a micro-batch, without forwards that the backward did again; twice the forward where
    it was not seen.
    """
    return float(row["flops"] + ((row["backward"] - row["recomputed"]) or 2 * row["flops"]))


class StepRate:
    """FLOPs per second of the steps after a profiled one, which are taken to compute as much.

    teraflops: of one step, the mean over ranks.
    peak: teraflops per second of a rank's device.
    """

    def __init__(self, teraflops: float, peak: float | None) -> None:
        self._teraflops = teraflops
        self._peak = peak
        self._last = time.perf_counter()

    def read(self) -> dict[str, float]:
        """From the time since the last call, at the end of each step."""
        last, self._last = self._last, time.perf_counter()
        rate = self._teraflops / max(self._last - last, 1e-9)
        found = {"Train/Samples/tflops_per_second": rate}
        return found if self._peak is None else {**found, "Train/Samples/mfu": rate / self._peak}
