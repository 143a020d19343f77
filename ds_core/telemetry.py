"""What a run reports: to observers and monitors, in progress lines, as timings. What nobody reads is not computed."""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.context import StashKey
from ds_core.discovery import OBSERVERS
from ds_core.monitor import MONITOR, MonitorMaster
from ds_core.requests import Request, agreed
from ds_core.timers import PhaseTimers, Throughput

if TYPE_CHECKING:
    from types import TracebackType

    from ds_core.context import Context
    from ds_core.running import RunningEngine

__all__ = ["Telemetry"]

log = logging.getLogger("ds_core.engine")
LEFT_OUT: StashKey[dict[nn.Parameter, str]] = StashKey("frozen parameters that the optimizer does not have")
_NOTHING = contextlib.nullcontext()
BREAKDOWN_EVERY = 10
"""Steps between breakdowns when ``steps_per_print`` is not set."""
LOOK_EVERY = 10
"""Steps between checks for parameters that were unfrozen: there can be thousands of frozen ones."""


class Telemetry:
    """Feeds the observers, the monitors and the progress log of one engine."""

    def __init__(self, ctx: Context, monitor: MonitorMaster) -> None:
        core = ctx.config.core
        self.ctx, self.monitor = ctx, monitor
        ctx.stash[MONITOR] = monitor
        self._observers = {hook: rows for hook in OBSERVERS if (rows := ctx.plugins.observers(hook))}
        self._timed, self._memory = core.wall_clock_breakdown, core.memory_breakdown
        measured = self._timed or self._memory
        self._timers = PhaseTimers(ctx.accelerator, breakdown=self._memory) if measured else None
        self.follows_phases = measured or self.observes("ds_phase_begin", "ds_phase_end")
        self._throughput = (
            Throughput(ctx.accelerator, core.timers.throughput.synchronized) if core.timers.throughput.enabled else None
        )
        # Breakdowns are asked for to be read, so they are printed even when no period is given.
        self._every = core.steps_per_print or (BREAKDOWN_EVERY if measured else 0)
        self._print_first = measured and not core.steps_per_print
        self._has_readers = self.observes("ds_step_end", "ds_request") or monitor.enabled
        self._keep_loss = bool(self._has_readers or self._every)
        self._losses: list[Tensor] = []
        self._left_out = ctx.stash.get(LEFT_OUT) or {}
        self._restore = _watch_uncaught(self) if self.observes("ds_exception") else None

    # -- observers -------------------------------------------------------------------------------------------

    def observes(self, *hooks: str) -> bool:
        """Whether any plugin implements any of the observer hooks."""
        return any(hook in self._observers for hook in hooks)

    def notify(self, hook: str, **arguments: Any) -> list[Any]:
        """Call the observers of `hook`; returns what they answered. One that fails is switched off."""
        rows = self._observers.get(hook, ())
        return [observer({"ctx": self.ctx, **arguments}) for observer in rows]

    def phase(self, name: str) -> contextlib.AbstractContextManager[None]:
        """To run a phase of a step in; `ds_phase_begin` lists their names. It is timed and observed where asked for."""
        return self._followed(name) if self.follows_phases else _NOTHING

    @contextlib.contextmanager
    def _followed(self, name: str) -> Iterator[None]:
        self.notify("ds_phase_begin", phase=name)
        try:
            with _NOTHING if self._timers is None else self._timers.phase(name):
                yield
        finally:
            self.notify("ds_phase_end", phase=name)

    # -- steps -----------------------------------------------------------------------------------------------

    def loss(self, loss: Tensor) -> None:
        """Record what one backward was run on; a micro-batch may have several."""
        if self._keep_loss:
            self._losses.append(loss.detach())

    def set_loss(self, loss: Tensor) -> None:
        """Record the whole batch's mean loss (train_batch), in place of the micro-batches' losses."""
        self._losses.clear()
        if self._keep_loss:
            self._losses.append(loss * self.ctx.batch.gas)

    def drop_loss(self) -> None:
        """Forget the losses of a batch that was not completed."""
        self._losses.clear()

    def step_begin(self, step: int) -> None:
        """An optimizer step is about to happen."""
        if self._left_out and step % LOOK_EVERY == 0 and any(p.requires_grad for p in self._left_out):
            self._warn_of_unfrozen()
        if self._observers:
            self.notify("ds_step_begin", step=step)

    def _warn_of_unfrozen(self) -> None:
        names = [name for param, name in self._left_out.items() if param.requires_grad]
        self._left_out = {}
        if self.ctx.mesh.index("dp") == 0:
            log.warning(
                "%s (%d in all) will not be trained: frozen when initialize was called, so the optimizer does not have "
                "it. To unfreeze parameters later, freeze them after initialize, or give them to it: "
                "model_parameters=model.parameters()",
                ", ".join(repr(n) for n in names[:5]),
                len(names),
            )

    def step_end(self, engine: RunningEngine) -> Request | None:
        """An optimizer step is done or was skipped, and counters are up to date; returns what all ranks shall do now.

        Collective where a plugin implements `ds_request`.
        """
        timings = self._timers.end_step() if self._timers is not None else None
        timings = timings if self._timed else None
        if not self._keep_loss:
            return None
        first = engine.global_steps == 1 and self._print_first
        printing = first or (self._every and engine.global_steps % self._every == 0)
        request = None
        if self._has_readers or printing:
            metrics = self._metrics(engine)
            self.notify("ds_step_end", step=engine.global_steps - 1, metrics=metrics)
            if self.monitor.enabled:
                self.monitor.write_events(self._events(engine, metrics, timings))
            if printing and self.ctx.rank == 0:
                self._print(engine, metrics, timings)
            if self.observes("ds_request"):
                answers = self.notify("ds_request", step=engine.global_steps - 1, metrics=metrics)
                request = agreed([r for r in answers if r is not None], self.ctx)
        self._losses.clear()
        return request

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
        parts = [f"step {engine.global_steps}", f"skipped {engine.skipped_steps}"]
        parts += [f"lr {engine.get_lr()}", f"mom {engine.get_mom()}"]
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
            log.info("memory: %.2f GiB free", self.ctx.accelerator.available_memory() / gib)

    def nonfinite(self, engine: RunningEngine) -> None:
        """Log that this step's gradients hold inf or NaN, and in which parameters this rank sees them."""
        ctx, scaler = self.ctx, engine.scaler
        level = logging.INFO if scaler is not None else logging.WARNING  # a loss scaler expects it now and then
        if ctx.rank != 0 or not log.isEnabledFor(level):
            return
        bad = [i.name for p, i in ctx.params.items() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
        where = f" (first in {', '.join(bad[:3])})" if bad else ""
        taken = "bf16.check_grad_overflow is off, so the weights take it"
        done = "the step is skipped" if ctx.precision.skip_nonfinite else taken
        scale = f" at loss scale {scaler.scale:g}" if scaler is not None else ""
        log.log(level, "gradients hold inf or NaN%s%s; %s", where, scale, done)

    # -- the end ---------------------------------------------------------------------------------------------

    def exception(self, error: BaseException | None) -> None:
        """`error` ends training; observers hear of one at most."""
        ends_well = isinstance(error, StopIteration) or (isinstance(error, SystemExit) and not error.code)
        if self._restore is not None and error is not None and not ends_well:
            self._restore()
            self._restore = None
            self.notify("ds_exception", error=error)

    def close(self) -> None:
        """The engine is being destroyed, perhaps by a ``finally`` while an exception ends training."""
        self.exception(sys.exc_info()[1])
        if self._restore is not None:
            self._restore()
        self.notify("ds_close")
        self.monitor.close()

    def log_config(self) -> None:
        """``dump_state``: log the run's whole configuration once."""
        if self.ctx.rank == 0:
            config, mesh, plugins = self.ctx.config, self.ctx.mesh, self.ctx.plugins
            parts = (config.redacted(), mesh.describe(), self.ctx.batch, self.ctx.precision, plugins.loaded_versions())
            log.info("config %s, mesh %s, batch %s, precision %s, plugins %s", *parts)


def _watch_uncaught(telemetry: Telemetry) -> Any:
    """Pass uncaught exceptions of the program to `telemetry`, then to who had them before; returns what undoes it."""
    ref, before = weakref.ref(telemetry), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if (alive := ref()) is not None:
            alive.exception(error)
        before(kind, error, trace)

    def restore() -> None:
        if sys.excepthook is hook:  # else somebody has put theirs before it, and it stays in the chain, without effect
            sys.excepthook = before

    sys.excepthook = hook
    return restore
