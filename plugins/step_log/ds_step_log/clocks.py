"""Times of steps and phases, marked by events on the device's stream and read later: no step waits
for the device.

A mark is an event of `Accelerator.new_event`: on a device with events it is queued like work, on
the CPU it reads the host's clock. A device without events is waited for at each mark.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PHASES = ("forward", "backward", "backward_inner", "backward_allreduce", "step")
PENDING = 1000
"""Steps whose marks are kept before the oldest is read: a print clears them, but not everybody
prints.
"""


class Later:
    """A number that is read late: ``float(later)`` waits for the device, if it has to.

    late: tells ds_core so; monitors read it in a thread.
    """

    late = True
    __slots__ = ("_read",)

    def __init__(self, read: Callable[[], float]) -> None:
        self._read = read

    def __float__(self) -> float:
        return self._read()


@dataclass(slots=True)
class StepTimes:
    """The marks of one optimizer step, or of several that were not looked at one by one.

    Begins and ends are events.
    """

    began: Any
    ended: Any = None
    # (phase, begin, end).
    spans: list[tuple[str, Any, Any]] = field(default_factory=list)
    # (begin, end) of evaluations, and milliseconds of those that are no longer in the list.
    pauses: list[tuple[Any, Any]] = field(default_factory=list)
    paused: float = 0.0
    # How many steps these are, and the samples and tokens of all ranks in them.
    steps: int = 1
    samples: int = 0
    # None: not known.
    tokens: int | None = None

    def fold_pauses(self) -> None:
        """Add up the pauses that the device has finished: there may be many between two steps that
        are read.
        """
        while self.pauses and self.pauses[0][1].query():
            begin, end = self.pauses.pop(0)
            self.paused += begin.elapsed_time(end)

    @property
    def is_over(self) -> bool:
        """Whether it can be read without waiting."""
        return bool(self.ended.query())

    def milliseconds(self) -> float:
        """From the end of the step before to the end of the last of these, without evaluations."""
        self.ended.synchronize()
        paused = self.paused + sum(begin.elapsed_time(end) for begin, end in self.pauses)
        return max(float(self.began.elapsed_time(self.ended) - paused), 1e-6)

    def phases(self) -> dict[str, float]:
        """`phase` of each."""
        return {name: self.phase(name) for name in PHASES}

    def phase(self, name: str) -> float:
        """Milliseconds of one phase, added up over micro-batches and steps."""
        self.ended.synchronize()
        return float(
            sum(begin.elapsed_time(end) for phase, begin, end in self.spans if phase == name)
        )

    def mean_of_phase(self, name: str) -> float:
        """Milliseconds of one phase in one step."""
        return self.phase(name) / self.steps


class StepClock:
    """Marks the steps of one engine.

    new_event: of its accelerator.
    phases: whether phases are marked too.
    """

    def __init__(self, new_event: Callable[[bool], Any], *, phases: bool) -> None:
        self._new_event = new_event
        self._phases = phases
        self._open: list[Any] = []
        self._paused: Any = None
        self._step = StepTimes(self._mark())

    def _mark(self) -> Any:
        event = self._new_event(True)
        event.record()
        return event

    def begin(self, phase: str) -> None:
        """A phase begins, perhaps inside another."""
        if self._phases:
            self._open.append(self._mark())

    def end(self, phase: str) -> None:
        """The innermost phase ends."""
        if self._phases and self._open:
            self._step.spans.append((phase, self._open.pop(), self._mark()))

    def pause(self) -> None:
        """An evaluation begins: its time is not the step's."""
        self._paused = self._mark()

    def resume(self) -> None:
        """The evaluation is done."""
        if self._paused is not None:
            self._step.pauses.append((self._paused, self._mark()))
            self._paused = None
            self._step.fold_pauses()

    def end_step(self, steps: int, samples: int, tokens: int | None) -> StepTimes:
        """The steps that end here; the next begins."""
        done = self._step
        self._paused = None
        done.ended = self._mark()
        done.steps = steps
        done.samples = samples
        done.tokens = tokens
        self._step = StepTimes(done.ended)
        return done


class Totals:
    """Steps added up since the last reading."""

    def __init__(self) -> None:
        self._pending: deque[StepTimes] = deque()
        self._clear()

    def _clear(self) -> None:
        self.steps = self.samples = self.tokens = 0
        self.milliseconds = 0.0
        self._knows_tokens = True
        self.phases = dict.fromkeys(PHASES, 0.0)

    def add(self, step: StepTimes) -> None:
        """Take a step; those that the device has finished are read."""
        self._pending.append(step)
        # Steps the device has finished are read without waiting; a very old one is waited for, so
        # that events do not pile up.
        while self._pending and (self._pending[0].is_over or len(self._pending) > PENDING):
            self._fold(self._pending.popleft())

    def _fold(self, step: StepTimes) -> None:
        self.steps += step.steps
        self.milliseconds += step.milliseconds()
        self.samples += step.samples
        self.tokens += step.tokens or 0
        self._knows_tokens &= step.tokens is not None
        for phase, spent in step.phases().items():
            self.phases[phase] += spent

    def read(self) -> Reading:
        """Wait for all steps so far; the totals begin anew."""
        if self._pending:
            self._pending[-1].ended.synchronize()  # once for all
        while self._pending:
            self._fold(self._pending.popleft())
        seconds = self.milliseconds / 1e3
        steps = max(1, self.steps)
        phases = {phase: spent / steps for phase, spent in self.phases.items()}
        rate = self.samples / seconds if seconds else 0.0
        tokens = self.tokens / seconds if seconds and self._knows_tokens else None
        self._clear()
        return Reading(rate, tokens, phases)


@dataclass(frozen=True, slots=True)
class Reading:
    """What was measured since the last reading."""

    # Per second; tokens are None where their number is not known.
    samples: float
    tokens: float | None
    # Milliseconds of an average step.
    phases: dict[str, float]
