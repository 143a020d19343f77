"""What a run reports to observers and monitors. What nobody reads is not computed."""

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

if TYPE_CHECKING:
    from types import TracebackType

    from ds_core.context import Context
    from ds_core.entries import Request
    from ds_core.running import RunningEngine

__all__ = ["Telemetry"]

log = logging.getLogger("ds_core.engine")
LEFT_OUT: StashKey[dict[nn.Parameter, str]] = StashKey("frozen parameters that the optimizer does not have")
_NOTHING = contextlib.nullcontext()
LOOK_EVERY = 10
"""Steps between checks for parameters that were unfrozen: there can be thousands of frozen ones."""


class Telemetry:
    """Feeds the observers and the monitors of one engine."""

    def __init__(self, ctx: Context, monitor: MonitorMaster) -> None:
        self.ctx, self.monitor = ctx, monitor
        ctx.stash[MONITOR] = monitor
        self._observers = {hook: rows for hook in OBSERVERS if (rows := ctx.plugins.observers(hook))}
        self.follows_phases = self.observes("ds_phase_begin", "ds_phase_end")
        self._has_readers = self.observes("ds_step_end", "ds_request") or monitor.enabled
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
        """To run a phase of a step in; `ds_phase_begin` lists their names. It is observed where a plugin wants it."""
        return self._followed(name) if self.follows_phases else _NOTHING

    @contextlib.contextmanager
    def _followed(self, name: str) -> Iterator[None]:
        self.notify("ds_phase_begin", phase=name)
        try:
            yield
        finally:
            self.notify("ds_phase_end", phase=name)

    # -- steps -----------------------------------------------------------------------------------------------

    def loss(self, loss: Tensor) -> None:
        """Record what one backward was run on; a micro-batch may have several."""
        if self._has_readers:
            self._losses.append(loss.detach())

    def set_loss(self, loss: Tensor) -> None:
        """Record the whole batch's mean loss (train_batch), in place of the micro-batches' losses."""
        self._losses = [loss * self.ctx.batch.gas] if self._has_readers else []

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
        if not self._has_readers:
            return None
        request, metrics = None, self._metrics(engine)
        self.notify("ds_step_end", step=engine.global_steps - 1, metrics=metrics)
        if self.monitor.enabled:
            self.monitor.write_events(self._events(engine, metrics))
        if self.observes("ds_request"):
            answers = self.notify("ds_request", step=engine.global_steps - 1, metrics=metrics)
            from ds_core.requests import agreed

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

    def _events(self, engine: RunningEngine, metrics: dict[str, float]) -> list[tuple[str, float, int]]:
        names = {
            "train_loss": "loss",
            "lr": "lr",
            **({"loss_scale": "loss_scale"} if engine.scaler is not None else {}),
        }
        at = engine.global_samples
        return [(f"Train/Samples/{name}", metrics[key], at) for name, key in names.items() if key in metrics]

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
        """The engine is being destroyed."""
        if self._restore is not None:
            self._restore()
        self.notify("ds_close")
        self.monitor.close()


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
