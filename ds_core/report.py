"""What a run tells the outside: observers, monitors, progress lines, timings. Nothing is computed that nobody reads."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.monitor import MONITOR, MonitorMaster
from ds_core.stash import StashKey
from ds_core.timers import PhaseTimers, Throughput

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.partition import Partitioner
    from ds_core.precision import LossScaler
    from ds_core.running import RunningEngine

__all__ = ["Reporter"]

log = logging.getLogger("ds_core.engine")
LEFT_OUT: StashKey[dict[nn.Parameter, str]] = StashKey("frozen parameters that the optimizer does not have")
_NOTHING = contextlib.nullcontext()
BREAKDOWN_EVERY = 10
"""Steps between breakdowns when ``steps_per_print`` is not set."""
LOOK_EVERY = 10
"""Steps between looks for parameters that were thawed: there can be thousands that are frozen."""


class Reporter:
    """Feeds observers, monitors and the progress log of one engine."""

    def __init__(self, ctx: Context, monitor: MonitorMaster) -> None:
        core = ctx.config.core
        self.ctx, self.monitor = ctx, monitor
        ctx.stash[MONITOR] = monitor
        self._timed, self._memory = core.wall_clock_breakdown, core.memory_breakdown
        measured = self._timed or self._memory
        self.timers = PhaseTimers(ctx.accelerator, breakdown=self._memory) if measured else None
        self._throughput = (
            Throughput(ctx.accelerator, core.timers.throughput.synchronized) if core.timers.throughput.enabled else None
        )
        # Breakdowns are asked for to be read, so they are printed even when no period is given.
        self._every = core.steps_per_print or (BREAKDOWN_EVERY if measured else 0)
        self._print_first = measured and not core.steps_per_print
        self._begin = ctx.plugins.observers("ds_step_begin")
        self._end = ctx.plugins.observers("ds_step_end")
        self._close = ctx.plugins.observers("ds_close")
        self._keep_loss = bool(self._end or self._every or monitor.enabled)
        self._losses: list[Tensor] = []
        self._left_out = ctx.stash.get(LEFT_OUT) or {}

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Time phase `name` when anybody asked for timings."""
        return _NOTHING if self.timers is None else self.timers.phase(name)

    def loss(self, loss: Tensor) -> None:
        """Take note of what one backward was run on; a micro-batch may have several."""
        if self._keep_loss:
            self._losses.append(loss.detach())

    def set_loss(self, loss: Tensor) -> None:
        """The whole batch's mean loss is known (train_batch); it replaces the micro-batches'."""
        self._losses.clear()
        if self._keep_loss:
            self._losses.append(loss * self.ctx.batch.gas)

    def drop_loss(self) -> None:
        """Forget the losses of a batch that was not completed."""
        self._losses.clear()

    def step_begin(self, step: int) -> None:
        """An optimizer step is about to happen."""
        if self._left_out and step % LOOK_EVERY == 0 and any(p.requires_grad for p in self._left_out):
            self._tell_thawed()
        if self._begin:
            for observer in self._begin:
                observer({"ctx": self.ctx, "step": step})

    def _tell_thawed(self) -> None:
        names = [name for param, name in self._left_out.items() if param.requires_grad]
        self._left_out = {}
        if self.ctx.mesh.index("dp") == 0:
            log.warning(
                "%s (%d in all) will not be trained: frozen when initialize was called, so the optimizer does not have "
                "it. To thaw parameters later, freeze them after initialize, or give them to it: "
                "model_parameters=model.parameters()",
                ", ".join(repr(n) for n in names[:5]),
                len(names),
            )

    def step_end(self, engine: RunningEngine) -> None:
        """An optimizer step is done or was skipped; counters are up to date."""
        timings = self.timers.end_step() if self.timers is not None else None
        timings = timings if self._timed else None
        if not self._keep_loss:
            return
        first = engine.global_steps == 1 and self._print_first
        printing = first or (self._every and engine.global_steps % self._every == 0)
        if self._end or printing or self.monitor.enabled:
            metrics = self._metrics(engine)
            for observer in self._end:
                observer({"ctx": self.ctx, "step": engine.global_steps - 1, "metrics": metrics})
            if self.monitor.enabled:
                self.monitor.write_events(self._events(engine, metrics, timings))
            if printing:
                self._print(engine, metrics, timings)
        self._losses.clear()

    def _metrics(self, engine: RunningEngine) -> dict[str, float]:
        lr = engine.get_lr()
        metrics = {
            "lr": lr[0] if lr else 0.0,
            "grad_norm": engine.get_global_grad_norm() or 0.0,
            "loss_scale": engine.loss_scale,
            "skipped": 0.0 if engine.was_step_applied() else 1.0,
            "samples": float(engine.global_samples),
        }
        if self._losses:
            total = torch.stack([x.reshape(()).float() for x in self._losses]).sum()
            metrics["loss"] = float(total) / self.ctx.batch.gas
        return metrics

    def _events(
        self, engine: RunningEngine, metrics: dict[str, float], timings: dict[str, float] | None
    ) -> list[tuple[str, float, int]]:
        x = engine.global_samples
        events = [("Train/Samples/lr", metrics["lr"], x)]
        if "loss" in metrics:
            events.insert(0, ("Train/Samples/train_loss", metrics["loss"], x))
        if engine.scaler is not None:
            events.append(("Train/Samples/loss_scale", metrics["loss_scale"], x))
        if timings is not None:
            events += [(f"Train/Samples/elapsed_time_ms_{phase}", ms, x) for phase, ms in timings.items()]
        return events

    def _print(self, engine: RunningEngine, metrics: dict[str, float], timings: dict[str, float] | None) -> None:
        if self.ctx.rank != 0:
            return
        parts = [
            f"step {engine.global_steps}",
            f"skipped {engine.skipped_steps}",
            f"lr {engine.get_lr()}",
            f"mom {engine.get_mom()}",
        ]
        if "loss" in metrics:
            parts.insert(1, f"loss {metrics['loss']:.4f}")
        if self._throughput is not None:
            parts.append(f"{self._throughput.read(engine.global_samples):.1f} samples/s")
        if timings is not None:
            parts.append("ms: " + ", ".join(f"{phase} {ms:.1f}" for phase, ms in timings.items()))
        log.info(", ".join(parts))
        if self._memory and self.timers is not None:
            gib = 2.0**30
            for phase, (used, peak) in self.timers.memory.items():
                log.info("memory after %s: %.2f GiB in use, %.2f GiB at peak", phase, used / gib, peak / gib)
            log.info("memory: %.2f GiB free", self.ctx.accelerator.available_memory() / gib)

    def nonfinite(self, partitioner: Partitioner, ctx: Context, scaler: LossScaler | None) -> None:
        """Say that this step's gradients hold inf or NaN, and where this rank sees them."""
        level = logging.INFO if scaler is not None else logging.WARNING  # a loss scaler expects it now and then
        if ctx.rank != 0 or not log.isEnabledFor(level):
            return
        bad = [i.name for p, i in ctx.params.items() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
        where = f" (first in {', '.join(bad[:3])})" if bad else ""
        taken = "bf16.check_grad_overflow is off, so the weights take it"
        done = "the step is skipped" if ctx.precision.skip_nonfinite else taken
        scale = f" at loss scale {scaler.scale:g}" if scaler is not None else ""
        log.log(level, "gradients hold inf or NaN%s%s; %s", where, scale, done)

    def close(self) -> None:
        """Tell observers that the engine goes, and close the monitors."""
        for observer in self._close:
            observer({"ctx": self.ctx})
        self.monitor.close()

    def dump(self, engine: Any) -> None:
        """``dump_state``: log the run's whole configuration once."""
        if self.ctx.rank == 0:
            log.info(
                "config %s, mesh %s, batch %s, precision %s, plugins %s",
                self.ctx.config.redacted(),
                self.ctx.mesh.describe(),
                self.ctx.batch,
                self.ctx.precision,
                self.ctx.plugins.loaded_versions(),
            )
