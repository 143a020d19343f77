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
from ds_core.entries import Event, Request
from ds_core.errors import PluginError, UsageError
from ds_core.plugins.discovery import OBSERVERS

if TYPE_CHECKING:
    from types import TracebackType

    from ds_core.context import Context
    from ds_core.engine import RunningEngine
    from ds_core.plugins.calls import Observer

log = logging.getLogger("ds_core.engine")
# One for all: making one for every phase of a step costs more than entering it.
_NOTHING = contextlib.nullcontext()
LATE = "late"
EVENTS = {
    name: f"Train/Samples/{name}" for name in ("lr", "loss_scale", "grad_norm", "skipped_steps")
}
EVENTS["loss"] = "Train/Samples/train_loss"
PERIODIC = ("ds_step_begin", "ds_metrics", "ds_step_end", "ds_phase_begin", "ds_phase_end")
"""The observers for which `ds_listens` may say that they need not be called in every step."""


@runtime_checkable
class Monitor(Protocol):
    """Receives metric events on rank 0.

    Where its `takes_tensors` is true, values may be those that are read late.
    """

    name: str

    def write_events(self, events: Sequence[Event]) -> None:
        """Take `events` in order. Training waits for it: see ``ds_monitor_kit.Background``."""

    def flush(self) -> None:
        """Make everything written so far readable by others."""

    def close(self) -> None:
        """Flush and release; nothing is called afterwards."""


class MonitorMaster:
    """Gives events to all monitors; only rank 0 has any.

    One that raises is closed and switched off, with a warning.
    """

    def __init__(self, monitors: Iterable[Monitor] = ()) -> None:
        self.monitors = list(monitors)

    @property
    def enabled(self) -> bool:
        """Whether anybody listens."""
        return bool(self.monitors)

    def write_events(self, events: Iterable[tuple[str, float | Tensor, int]]) -> None:
        """Send ``(name, value, samples)`` triples to all monitors; also for users' and plugins' own
        metrics.
        """
        if checked := [_event(*event) for event in events]:
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
                getattr(monitor, method)(
                    *(a if takes else [Event(n, float(v), s) for n, v, s in a] for a in arguments)
                )
            except Exception as error:
                # An unreachable monitoring server must not end training.
                self.monitors.remove(monitor)
                what = f"{method} ({type(error).__name__}: {error})"
                log.warning(
                    "monitor %s failed in %s; it is switched off and training continues",
                    monitor.name,
                    what,
                )
                if method != "close":
                    with contextlib.suppress(Exception):
                        monitor.close()


def _event(name: str, value: Any, step: int) -> Event:
    try:
        # A tensor of a device is read later, or training would wait for the device here.
        late = (
            value.device.type != "cpu" and value.numel() == 1
            if isinstance(value, Tensor)
            else hasattr(value, LATE)
        )
        return Event(str(name), value if late else value.__float__(), int(step))
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        kinds = "a value is a number or a tensor of one element, a step an integer"
        raise UsageError(f"metric {name!r} is {value!r} at step {step!r}; {kinds}") from error


class Metrics(UserDict[str, Any]):
    """Numbers by name.

    One that is a tensor is read, and its device waited for, when it is asked for.
    """

    def __getitem__(self, name: str) -> float:
        return float(self.data[name])


class _Phase:
    """Tells observers that a phase begins and ends, also by an exception."""

    __slots__ = ("_inputs", "_name", "_telemetry")

    def __init__(self, telemetry: Telemetry, name: str, inputs: Any) -> None:
        self._telemetry = telemetry
        self._name = name
        self._inputs = inputs

    def __enter__(self) -> None:
        self._telemetry.notify("ds_phase_begin", phase=self._name, inputs=self._inputs)

    def __exit__(self, *_: object) -> None:
        self._telemetry.notify("ds_phase_end", phase=self._name, metrics={})


class Telemetry:
    """Feeds the observers and monitors of one engine.

    Who listens in which step is decided once (`ds_listens`), and from step to step only looked up:
    an observer that does not listen costs nothing.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        given = (
            [m for a in ctx.plugins.ask("ds_monitors", ctx=ctx) for m in a.value]
            if ctx.rank == 0
            else []
        )
        self.monitor = MonitorMaster(given)
        # Every observer, by hook, with the number of steps from one call to the next.
        self._observers: dict[str, list[tuple[int, Observer]]] = {}
        # Those of them that are called in the step that runs now.
        self._now: dict[str, list[Observer]] = {}
        # Periods of more than one step.
        self._periods: tuple[int, ...] = ()
        # Those of them that end with the step that runs now.
        self._due: tuple[int, ...] | None = None
        # Periods at which some observer on any rank reads the step's facts; None until ranks have
        # exchanged theirs.
        self._read_at: frozenset[int] | None = None
        # Whether phases are observed in this step.
        self.follows_phases = False
        # Whether observers read what it is like.
        self._is_read = False
        # Whether `ds_metrics` is called after this step, the same on all ranks. In the first step,
        # at whose end ranks agree on it, True means that it may be.
        self.collects = False
        self._losses: list[Tensor] = []
        # Whether observers still have to be called at the end of the run.
        self._open = False
        # Restores the program's own handling of uncaught errors.
        self._restore: Any = None

    # -- observers ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """The engine is built: ask who listens."""
        self._decide(1)
        self._open = True
        if self.observes("ds_close"):
            self._restore = _watch_uncaught(self)

    def _decide(self, step: int) -> None:
        """Ask who listens to what, and at which steps."""
        ctx = self.ctx
        said = {a.plugin.module: a.value for a in ctx.plugins.ask("ds_listens", ctx=ctx)}
        for module, periods in said.items():
            if unknown := periods.keys() - set(PERIODIC):
                names = ", ".join(PERIODIC)
                raise PluginError(
                    f"ds_listens of {module} names {', '.join(sorted(unknown))}; it may name "
                    f"{names}"
                )
        self._observers = {}
        for hook in OBSERVERS:
            rows = [
                (said.get(o.plugin.module, {}).get(hook, 1), o) for o in ctx.plugins.observers(hook)
            ]
            if listening := [row for row in rows if row[0] > 0]:
                self._observers[hook] = listening
        self._periods = tuple(
            sorted({every for rows in self._observers.values() for every, _ in rows} - {1})
        )
        self._due = None
        self.collects = "ds_metrics" in self._observers
        self.turn(step)

    def turn(self, step: int) -> None:
        """Optimizer step `step`, counted from 1, comes next, with the micro-batches before it: who
        listens then?
        """
        due = tuple(every for every in self._periods if step % every == 0)
        # Most steps have the same listeners as the one before.
        if due != self._due:
            self._due = due
            listening = {
                hook: [o for every, o in rows if every in (1, *due)]
                for hook, rows in self._observers.items()
            }
            self._now = {hook: rows for hook, rows in listening.items() if rows}
            self.follows_phases = "ds_phase_begin" in self._now or "ds_phase_end" in self._now
            self._is_read = "ds_step_end" in self._now or "ds_request" in self._now
        if self._read_at is not None:
            self.collects = "ds_metrics" in self._now and any(
                step % every == 0 for every in self._read_at
            )

    def observes(self, *hooks: str) -> bool:
        """Whether any plugin implements any of the observer hooks, and listens in some steps."""
        return any(hook in self._observers for hook in hooks)

    def notify(self, hook: str, **arguments: Any) -> list[Any]:
        """Call the observers of `hook` that listen now; returns what they answered.

        One that fails is switched off.
        """
        rows = self._now.get(hook)
        if rows is None:
            return []
        arguments["ctx"] = self.ctx
        return [observer(arguments) for observer in rows]

    def phase(self, name: str, inputs: Any = None) -> contextlib.AbstractContextManager[None]:
        """To run a phase of a step in, as `ds_phase_begin` describes it.

        It is observed where a plugin wants it.
        """
        return _Phase(self, name, inputs) if self.follows_phases else _NOTHING

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[Metrics]:
        """To evaluate in: the phase "eval".

        It is no part of a step, so all observers of phases hear of it.

        What is put into the metrics that it gives is read when an observer asks.
        """
        metrics = Metrics()
        self._tell_all("ds_phase_begin", phase="eval", inputs=None)
        try:
            yield metrics
        finally:
            self._tell_all("ds_phase_end", phase="eval", metrics=metrics)

    def _tell_all(self, hook: str, **arguments: Any) -> None:
        for observer in self.ctx.plugins.observers(hook):
            observer({**arguments, "ctx": self.ctx})

    # -- steps -------------------------------------------------------------------------------------

    @property
    def has_readers(self) -> bool:
        """Whether anybody on this rank reads what the step that runs now is like."""
        return self._is_read or self.monitor.enabled

    def _tell_readers(self, step: int) -> None:
        """Ranks tell each other at which steps anybody reads, so that `ds_metrics` is called on all
        or none.

        At the end of the first step, when plugins have seen what the model is given and say again
        how they listen.
        """
        self._decide(step)
        rows = [*self._observers.get("ds_step_end", ()), *self._observers.get("ds_request", ())]
        mine = {every for every, _ in rows} | ({1} if self.monitor.enabled else set())
        told = (
            comm.all_gather_json(sorted(mine))
            if "ds_metrics" in self._observers
            else [sorted(mine)]
        )
        self._read_at = frozenset(every for periods in told for every in periods)
        self.turn(step)

    def loss(self, loss: Tensor) -> None:
        """Record what one backward was run on; a micro-batch may have several."""
        if self.has_readers:
            self._losses.append(loss.detach())

    def set_loss(self, loss: Tensor) -> None:
        """Record the whole batch's mean loss (train_batch), instead of the micro-batches'
        losses."""
        # Times gas, by which `_metrics` divides the sum of the micro-batches' losses.
        self._losses = [loss * self.ctx.batch.gas] if self.has_readers else []

    def drop_loss(self) -> None:
        """Forget the losses of a batch that was not completed."""
        self._losses.clear()

    def step_begin(self, step: int) -> None:
        """An optimizer step is about to happen."""
        if "ds_step_begin" in self._now:
            self.notify("ds_step_begin", step=step)

    def step_end(self, engine: RunningEngine) -> list[Request]:
        """An optimizer step is done or was skipped, and counters are up to date; returns what all
        ranks are to do now.

        Collective where a plugin implements `ds_request` or `ds_metrics`.
        """
        step = engine.global_steps - 1
        requests: list[Request] = []
        if self._read_at is None and self._observers:
            self._tell_readers(engine.global_steps)
        given = self.notify("ds_metrics", step=step) if self.collects else ()
        if self.has_readers:
            metrics = Metrics(
                {n: v for answer in given for n, v in (answer or {}).items()}
                | self._metrics(engine)
            )
            self.notify("ds_step_end", step=step, metrics=metrics)
            if self.monitor.enabled:
                # Without a scaler the loss scale is always 1. Names without a slash are observers'.
                names = EVENTS if engine.scaler is not None else {**EVENTS, "loss_scale": ""}
                events = {names.get(name, name): value for name, value in metrics.data.items()}
                self.monitor.write_events(
                    (n, v, engine.global_samples) for n, v in events.items() if "/" in n
                )
            if "ds_request" in self._now:
                answers = self.notify("ds_request", step=step, metrics=metrics)
                requests = _agreed([r for r in answers if r is not None], self.ctx)
        self._losses.clear()
        self.turn(engine.global_steps + 1)
        return requests

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
            metrics["loss"] = (
                torch.stack([x.reshape(()).float() for x in self._losses]).sum()
                / self.ctx.batch.gas
            )
        return metrics

    def nonfinite(self, engine: RunningEngine) -> None:
        """Log that this step's gradients hold inf or NaN, and in which parameters this rank sees
        them.
        """
        ctx = self.ctx
        scaler = engine.scaler
        # a loss scaler expects it now and then
        level = logging.INFO if scaler is not None else logging.WARNING
        # Looking for the parameters reads every gradient once more.
        if ctx.rank != 0 or not log.isEnabledFor(level):
            return
        bad = [
            i.name
            for p, i in ctx.params.items()
            if p.grad is not None and not bool(torch.isfinite(p.grad).all())
        ]
        where = f" (first in {', '.join(bad[:3])})" if bad else ""
        taken = "bf16.check_grad_overflow is off, so the weights take it"
        done = "the step is skipped" if ctx.precision.skip_nonfinite else taken
        scale = f" at loss scale {scaler.scale:g}" if scaler is not None else ""
        log.log(level, "gradients hold inf or NaN%s%s; %s", where, scale, done)

    # -- the end -----------------------------------------------------------------------------------

    def end(self, error: BaseException | None) -> None:
        """Training ends, with `error` if any; observers hear of it once."""
        if self._restore is not None:
            self._restore()
            self._restore = None
        if self._open:
            self._open = False
            # Training that runs out of data, or asks to exit with 0, has not failed.
            ends_well = isinstance(error, StopIteration) or (
                isinstance(error, SystemExit) and not error.code
            )
            self.notify("ds_close", error=None if ends_well else error)

    def close(self, error: BaseException | None) -> None:
        """The engine is being destroyed, perhaps while `error` passes."""
        self.end(error)
        self.monitor.close()


def _agreed(mine: list[Request], ctx: Context) -> list[Request]:
    """All that ranks ask for: a request per folder, then the end; the same on all ranks.

    Collective, a byte per question.
    """
    stop = any(r.stop for r in mine)
    saves = [r.save for r in mine]
    code = max((r.exit_code % 256 for r in mine), default=0)
    if ctx.world_size > 1:
        flags = torch.tensor(
            [stop, any(saves), code],
            dtype=torch.uint8,
            device=ctx.accelerator.current_device(),
        )
        comm.label("what plugins ask for after this step")
        comm.all_reduce(flags, op=torch.distributed.ReduceOp.MAX)
        stop, any_saves, code = flags.tolist()
        # Folders are text, so they are sent only where any rank has one.
        if any_saves:
            saves = [folder for row in comm.all_gather_json(saves) for folder in row]
    return [Request(save=f) for f in dict.fromkeys(saves)] + [Request(bool(stop), None, code)]


def _watch_uncaught(telemetry: Telemetry) -> Any:
    """Pass uncaught exceptions of the program to `telemetry`, then to who had them before; returns
    what undoes it.
    """
    ref = weakref.ref(telemetry)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if (alive := ref()) is not None:
            alive.end(error)
        hook.before(kind, error, trace)  # type: ignore[attr-defined]

    def restore() -> None:
        # otherwise another hook was installed over it, and this one stays in the chain without
        # effect
        if sys.excepthook is hook:
            sys.excepthook = before

    hook.before = before  # type: ignore[attr-defined]  # a launcher that shows the traceback puts its own here
    sys.excepthook = hook
    return restore
