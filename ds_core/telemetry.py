"""What a run reports to observers and monitors. What has no reader is not computed."""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from collections import UserDict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ds_core import comm
from ds_core.discovery import OBSERVERS
from ds_core.entries import Event, Request
from ds_core.errors import UsageError

if TYPE_CHECKING:
    from types import TracebackType

    from ds_core.context import Context
    from ds_core.running import RunningEngine

__all__ = ["Monitor", "MonitorMaster", "Telemetry"]

log = logging.getLogger("ds_core.engine")
_NOTHING, LATE = contextlib.nullcontext(), "late"
EVENTS = {name: f"Train/Samples/{name}" for name in ("lr", "loss_scale", "grad_norm", "skipped_steps")}
EVENTS["loss"] = "Train/Samples/train_loss"


@runtime_checkable
class Monitor(Protocol):
    """Receives metric events on rank 0. Where its `takes_tensors` is true, values may be those that are read late."""

    name: str

    def write_events(self, events: Sequence[Event]) -> None:
        """Take `events` in order. Training waits for it: see ``ds_monitor_kit.Background``."""

    def flush(self) -> None:
        """Make everything written so far readable by others."""

    def close(self) -> None:
        """Flush and release; nothing is called afterwards."""


class MonitorMaster:
    """Gives events to all monitors; only rank 0 has any. One that raises is closed and switched off, with a warning."""

    def __init__(self, monitors: Iterable[Monitor] = ()) -> None:
        self.monitors = list(monitors)

    @property
    def enabled(self) -> bool:
        """Whether anybody listens."""
        return bool(self.monitors)

    def write_events(self, events: Iterable[tuple[str, float | Tensor, int]]) -> None:
        """Send ``(name, value, samples)`` triples to all monitors; also for users' and plugins' own metrics."""
        checked = [_event(*event) for event in events]
        if self.monitors and checked:
            self._each("write_events", checked)

    def flush(self) -> None:
        """Flush every monitor."""
        self._each("flush")

    def close(self) -> None:
        """Close every monitor, for good."""
        self._each("close")
        self.monitors.clear()

    def _each(self, method: str, *arguments: Sequence[Event]) -> None:
        for monitor in list(self.monitors):
            takes = getattr(monitor, "takes_tensors", False)
            try:
                getattr(monitor, method)(*(a if takes else [Event(n, float(v), s) for n, v, s in a] for a in arguments))
            except Exception as error:
                self.monitors.remove(monitor)
                what = f"{method} ({type(error).__name__}: {error})"
                log.warning("monitor %s failed in %s; it is switched off and training goes on", monitor.name, what)
                if method != "close":
                    with contextlib.suppress(Exception):
                        monitor.close()


def _event(name: str, value: Any, step: int) -> Event:
    try:
        late = value.device.type != "cpu" and value.numel() == 1 if isinstance(value, Tensor) else hasattr(value, LATE)
        return Event(str(name), value if late else value.__float__(), int(step))
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        kinds = "a value is a number or a tensor of one element, a step an integer"
        raise UsageError(f"metric {name!r} is {value!r} at step {step!r}; {kinds}") from error


class Metrics(UserDict[str, Any]):
    """Numbers by name. One that is a tensor is read, and its device waited for, when it is asked for."""

    def __getitem__(self, name: str) -> float:
        return float(self.data[name])


class Telemetry:
    """Feeds the observers and monitors of one engine. collects: whether `ds_metrics` is called, on all ranks alike."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        given = [m for a in ctx.plugins.ask("ds_monitors", ctx=ctx) for m in a.value] if ctx.rank == 0 else []
        self.monitor = MonitorMaster(given)
        self._observers = {hook: rows for hook in OBSERVERS if (rows := ctx.plugins.observers(hook))}
        self.follows_phases = self.observes("ds_phase_begin", "ds_phase_end")
        self.collects = None if self.observes("ds_metrics") else False
        self._losses: list[Tensor] = []
        self._restore = _watch_uncaught(self) if self.observes("ds_exception") else None

    # -- observers -------------------------------------------------------------------------------------------

    def observes(self, *hooks: str) -> bool:
        """Whether any plugin implements any of the observer hooks."""
        return any(hook in self._observers for hook in hooks)

    def notify(self, hook: str, **arguments: Any) -> list[Any]:
        """Call the observers of `hook`; returns what they answered. One that fails is switched off."""
        rows = self._observers.get(hook, ())
        return [observer({"ctx": self.ctx, **arguments}) for observer in rows]

    def phase(self, name: str, inputs: Any = None) -> contextlib.AbstractContextManager[None]:
        """To run a phase of a step in, as `ds_phase_begin` describes it. It is observed where a plugin wants it."""
        return self._followed(name, inputs) if self.follows_phases else _NOTHING

    @contextlib.contextmanager
    def _followed(self, name: str, inputs: Any) -> Iterator[None]:
        self.notify("ds_phase_begin", phase=name, inputs=inputs)
        try:
            yield
        finally:
            self.notify("ds_phase_end", phase=name)

    # -- steps -----------------------------------------------------------------------------------------------

    @property
    def has_readers(self) -> bool:
        """Whether anybody on this rank reads what a step was like."""
        return self.monitor.enabled or self.observes("ds_step_end", "ds_request")

    def loss(self, loss: Tensor) -> None:
        """Record what one backward was run on; a micro-batch may have several."""
        if self.has_readers:
            self._losses.append(loss.detach())

    def set_loss(self, loss: Tensor) -> None:
        """Record the whole batch's mean loss (train_batch), in place of the micro-batches' losses."""
        self._losses = [loss * self.ctx.batch.gas] if self.has_readers else []

    def drop_loss(self) -> None:
        """Forget the losses of a batch that was not completed."""
        self._losses.clear()

    def step_begin(self, step: int) -> None:
        """An optimizer step is about to happen."""
        if self._observers:
            self.notify("ds_step_begin", step=step)

    def step_end(self, engine: RunningEngine) -> Request | None:
        """An optimizer step is done or was skipped, and counters are up to date; returns what all ranks shall do now.

        Collective where a plugin implements `ds_request` or `ds_metrics`.
        """
        step, request = engine.global_steps - 1, None
        if self.collects is None:
            self.collects = any(comm.all_gather_json(self.has_readers))
        given = self.notify("ds_metrics", step=step) if self.collects else ()
        if self.has_readers:
            metrics = Metrics({n: v for answer in given for n, v in (answer or {}).items()} | self._metrics(engine))
            self.notify("ds_step_end", step=step, metrics=metrics)
            if self.monitor.enabled:
                names = EVENTS if engine.scaler is not None else {**EVENTS, "loss_scale": ""}
                events = {names.get(name, name): value for name, value in metrics.data.items()}
                self.monitor.write_events((n, v, engine.global_samples) for n, v in events.items() if "/" in n)
            if self.observes("ds_request"):
                answers = self.notify("ds_request", step=step, metrics=metrics)
                request = _agreed([r for r in answers if r is not None], self.ctx)
        self._losses.clear()
        return request

    def _metrics(self, engine: RunningEngine) -> dict[str, float | Tensor]:
        metrics: dict[str, float | Tensor] = {
            "lr": (engine.get_lr() or [0.0])[0],
            "grad_norm": engine.get_global_grad_norm() or 0.0,
            "loss_scale": engine.loss_scale,
            "skipped": 0.0 if engine.was_step_applied() else 1.0,
            "skipped_steps": engine.skipped_steps,
            "samples": float(engine.global_samples),
        }
        if self._losses:
            metrics["loss"] = torch.stack([x.reshape(()).float() for x in self._losses]).sum() / self.ctx.batch.gas
        return metrics

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


def _agreed(mine: Sequence[Request], ctx: Context) -> Request | None:
    """All that ranks ask for, or None; the first rank's first folder counts. Collective, a byte per question."""
    stop, save = any(r.stop for r in mine), next((r.save for r in mine if r.save), None)
    code = max((r.exit_code % 256 for r in mine), default=0)
    if ctx.world_size > 1:
        flags = torch.tensor([stop, save is not None, code], dtype=torch.uint8, device=ctx.accelerator.current_device())
        comm.label("what plugins ask for after this step")
        comm.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
        stop, saves, code = flags.tolist()
        if saves:
            save = next(folder for folder in comm.all_gather_json(save) if folder)
    return Request(bool(stop), save, code) if stop or save or code else None


def _watch_uncaught(telemetry: Telemetry) -> Any:
    """Pass uncaught exceptions of the program to `telemetry`, then to who had them before; returns what undoes it."""
    ref, before = weakref.ref(telemetry), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if (alive := ref()) is not None:
            alive.exception(error)
        hook.before(kind, error, trace)  # type: ignore[attr-defined]

    def restore() -> None:
        if sys.excepthook is hook:  # else somebody has put theirs before it, and it stays in the chain, without effect
            sys.excepthook = before

    hook.before = before  # type: ignore[attr-defined]  # a launcher that shows the traceback puts its own here
    sys.excepthook = hook
    return restore
