"""Proves a schedule: complete, free of deadlock, and how large its bubble and its activations are.

All stages' instructions are carried out on counters instead of tensors, over one of three kinds of
transport: sends that never wait, those that wait when so many messages are under way (as on the
engine), and sends that wait for their receive (the weakest promise of any backend, for schedules
whose steps are atomic).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ds_pipeline.schedules.schedule import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
    BufferOpInstruction,
    ForwardPass,
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)


class ScheduleError(ValueError):
    """A schedule that would deadlock, leave work out, or mix up micro-batches; names stage and
    instruction.
    """


@dataclass(frozen=True, slots=True)
class Busy:
    """Time in which a stage computes.

    kind: "F", "B" (full backward), "I" (inputs' half) or "W" (weights' half).
    """

    kind: str
    micro: int
    chunk: int
    start: float
    stop: float


@dataclass(frozen=True, slots=True)
class ScheduleProof:
    """What a run of a schedule is like, in units of one forward of one chunk.

    makespan: from the first to the last work.
    bubble: share of all stages' time in which they wait.
    activations: per stage the most micro-batch chunks whose activations it keeps.
    spans: per stage, in order.
    """

    makespan: float
    bubble: float
    activations: tuple[int, ...]
    spans: tuple[tuple[Busy, ...], ...]

    @property
    def speedup(self) -> float:
        """Over one process that does all the work."""
        return sum(s.stop - s.start for stage in self.spans for s in stage) / self.makespan


@dataclass(slots=True)
class _Buffer:
    """State of a buffer, for one micro-batch."""

    micro: int | None = None
    labels: int | None = None
    inputs: bool = False
    outputs: bool = False
    grad: bool = False
    input_grad: bool = False
    weight_due: bool = False


@dataclass(slots=True)
class _Stage:
    todo: deque[PipeInstruction]
    chunks: int
    clock: float = 0.0
    loaded: dict[int, int] = field(default_factory=dict)
    buffers: dict[tuple[int, int], _Buffer] = field(default_factory=dict)
    forwards: set[tuple[int, int]] = field(default_factory=set)
    backwards: set[tuple[int, int]] = field(default_factory=set)
    weights: set[tuple[int, int]] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)
    live: int = 0
    most: int = 0
    spans: list[Busy] = field(default_factory=list)


Message = tuple[int, int, float]  # micro-batch, part of the model that it is for, when it is there


def check(
    make: Callable[[int], PipeSchedule],
    *,
    train: bool = True,
    waiting: bool = False,
    capacity: int | None = None,
    forward: float = 1.0,
    backward: float = 2.0,
) -> ScheduleProof:
    """Carry out the schedules ``make(0) .. make(stages - 1)``; ScheduleError when they do not do
    their work.

    train: whether every micro-batch must also go backward, be reduced and stepped.
    waiting: sends wait for receives.
    capacity: a send waits while so many messages of its kind from its stage are not received yet
        (None: never).
    forward, backward: time of one chunk's passes; each half of a split backward takes half.
    """
    schedules = [make(0)]
    schedules += [make(s) for s in range(1, schedules[0].num_stages)]
    if wrong := [s.chunks for s in schedules if s.chunks != schedules[0].chunks]:
        raise ScheduleError(f"stage 0 has {schedules[0].chunks} chunks, another {wrong[0]}")
    costs = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    run = _Simulation(schedules, costs, train=train, waiting=waiting, capacity=capacity)
    run.go()
    return run.proof()


class _Simulation:
    def __init__(
        self,
        schedules: Sequence[PipeSchedule],
        costs: Mapping[str, float],
        *,
        train: bool,
        waiting: bool,
        capacity: int | None,
    ) -> None:
        self.schedules = schedules
        self.cost = costs
        self.train = train
        self.waiting = waiting
        self.capacity = capacity
        self.count = len(schedules)
        self.chunks = schedules[0].chunks
        self.parts = self.count * self.chunks
        self.stages = [
            _Stage(deque(i for step in s.steps() for i in step), s.chunks) for s in schedules
        ]
        # Activations and gradients use separate channels. On each, messages from one stage to
        # another arrive in the order in which they were sent (the engine's transport promises no
        # more, since NCCL does not).
        self.wires: dict[tuple[int, int, str], deque[Message]] = {}

    def go(self) -> None:
        """Run until no stage has an instruction left."""
        while any(s.todo for s in self.stages):
            moved = False
            for number, stage in enumerate(self.stages):
                while stage.todo and self._step(number, stage, stage.todo[0]):
                    stage.todo.popleft()
                    moved = True
            if not moved:
                waits = [
                    f"stage {n} waits in {s.todo[0]}" for n, s in enumerate(self.stages) if s.todo
                ]
                raise ScheduleError(f"deadlock: {'; '.join(waits)}")
        self._complete()

    def _step(self, number: int, stage: _Stage, what: PipeInstruction) -> bool:
        """False when it must wait."""
        if isinstance(what, (ReduceTiedGrads, ReduceGrads, OptimizerStep)):
            stage.ended.append(what.name)
            return True
        if not isinstance(what, BufferOpInstruction):
            return True  # an instruction of the user's schedule
        if not 0 <= what.chunk < self.chunks:
            raise self._wrong(number, what, f"there is no chunk {what.chunk}")
        buffer = stage.buffers.setdefault((what.chunk, what.buffer_id), _Buffer())
        limit = self.schedules[number].num_pipe_buffers()
        if what.buffer_id >= limit:
            raise self._wrong(number, what, f"the stage has {limit} buffers")
        part = what.chunk * self.count + number
        if isinstance(what, LoadMicroBatch):
            return self._load(number, stage, what, buffer, part)
        if isinstance(what, (SendActivation, SendGrad)):
            return self._send(number, stage, what, buffer, part)
        if isinstance(what, (RecvActivation, RecvGrad)):
            return self._receive(number, stage, what, buffer, part)
        return self._compute(number, stage, what, buffer, part)

    def _load(
        self, number: int, stage: _Stage, what: BufferOpInstruction, buffer: _Buffer, part: int
    ) -> bool:
        micro = stage.loaded.get(what.chunk, 0)
        stage.loaded[what.chunk] = micro + 1
        if micro >= self.schedules[number].num_micro_batches:
            raise self._wrong(number, what, f"there are only {micro} micro-batches")
        if part == 0:
            self._begin(number, what, buffer, micro)
        elif part != self.parts - 1:
            raise self._wrong(
                number, what, "only the first and the last part of the model take data"
            )
        if part == self.parts - 1:
            buffer.labels = micro  # they may come before the inputs do
        return True

    def _begin(self, number: int, what: PipeInstruction, buffer: _Buffer, micro: int) -> None:
        if buffer.weight_due or (self.train and buffer.outputs):
            raise self._wrong(number, what, f"micro-batch {buffer.micro} still needs the buffer")
        buffer.micro = micro
        buffer.inputs = True
        buffer.outputs = buffer.grad = buffer.input_grad = False

    def _send(
        self, number: int, stage: _Stage, what: BufferOpInstruction, buffer: _Buffer, part: int
    ) -> bool:
        forward = isinstance(what, SendActivation)
        there = buffer.outputs if forward else buffer.input_grad
        if not there or buffer.micro is None:
            raise self._wrong(number, what, "there is nothing to send")
        target = part + 1 if forward else part - 1
        if not 0 <= target < self.parts:
            raise self._wrong(number, what, "there is no stage to send to")
        kind = "act" if forward else "grad"
        wire = self.wires.setdefault((number, target % self.count, kind), deque())
        if self.waiting:
            peer = self.stages[target % self.count]
            wanted = RecvActivation if forward else RecvGrad
            if (
                not (peer.todo and isinstance(peer.todo[0], wanted))
                and target % self.count != number
            ):
                return False
            stage.clock = max(stage.clock, peer.clock)
        elif (
            self.capacity is not None
            and len(wire) >= self.capacity
            and target % self.count != number
        ):
            return False
        wire.append((buffer.micro, target, stage.clock))
        if not forward:
            buffer.input_grad = False
        return True

    def _receive(
        self, number: int, stage: _Stage, what: BufferOpInstruction, buffer: _Buffer, part: int
    ) -> bool:
        forward = isinstance(what, RecvActivation)
        source = part - 1 if forward else part + 1
        if not 0 <= source < self.parts:
            raise self._wrong(number, what, "there is no stage to receive from")
        wire = self.wires.get((source % self.count, number, "act" if forward else "grad"))
        if not wire:
            return False
        micro, target, when = wire[0]
        if target != part:
            raise self._wrong(
                number, what, f"what comes is of micro-batch {micro} for part {target}"
            )
        wire.popleft()
        stage.clock = max(stage.clock, when)
        if forward:
            self._begin(number, what, buffer, micro)
        elif buffer.micro != micro:
            raise self._wrong(
                number, what, f"a gradient of micro-batch {micro} for micro-batch {buffer.micro}"
            )
        else:
            buffer.grad = True
        return True

    def _compute(
        self, number: int, stage: _Stage, what: BufferOpInstruction, buffer: _Buffer, part: int
    ) -> bool:
        if isinstance(what, ForwardPass):
            kind = "F"
            ready = buffer.inputs
        elif isinstance(what, (BackwardPass, BackwardInput)):
            kind = "B" if isinstance(what, BackwardPass) else "I"
            ready = buffer.outputs and (buffer.grad or part == self.parts - 1)
        elif isinstance(what, BackwardWeight):
            kind = "W"
            ready = buffer.weight_due
        else:
            return True
        if not ready or buffer.micro is None:
            raise self._wrong(number, what, f"its buffer does not hold what it needs ({buffer})")
        if kind == "F" and part == self.parts - 1 and buffer.labels != buffer.micro:
            raise self._wrong(
                number,
                what,
                f"labels of micro-batch {buffer.labels} for micro-batch {buffer.micro}",
            )
        if stage.ended:
            raise self._wrong(number, what, f"it comes after {stage.ended[-1]}")
        done = {
            "F": stage.forwards,
            "B": stage.backwards,
            "I": stage.backwards,
            "W": stage.weights,
        }[kind]
        if (buffer.micro, what.chunk) in done:
            raise self._wrong(number, what, f"micro-batch {buffer.micro} was there before")
        done.add((buffer.micro, what.chunk))
        stage.spans.append(
            Busy(kind, buffer.micro, what.chunk, stage.clock, stage.clock + self.cost[kind])
        )
        stage.clock += self.cost[kind]
        if kind == "F":
            buffer.inputs = self.train
            buffer.outputs = True
            stage.live += 1
            stage.most = max(stage.most, stage.live)
            return True
        if kind in "BI":
            buffer.outputs = buffer.grad = buffer.inputs = False
            buffer.input_grad = part > 0
            buffer.weight_due = kind == "I"
        else:
            buffer.weight_due = False
        if kind in "BW":
            stage.live -= 1
        return True

    def _complete(self) -> None:
        micro_batches = self.schedules[0].num_micro_batches
        everything = {(m, c) for m in range(micro_batches) for c in range(self.chunks)}
        for number, stage in enumerate(self.stages):
            halves = {(s.micro, s.chunk) for s in stage.spans if s.kind == "I"}
            kinds = [
                ("forward", stage.forwards, everything),
                ("weights' backward", stage.weights, halves),
            ]
            if self.train:
                kinds.insert(1, ("backward", stage.backwards, everything))
            for name, done, wanted in kinds:
                if missing := sorted(wanted - done):
                    raise ScheduleError(
                        f"stage {number}: no {name} of micro-batch {missing[0][0]}, chunk "
                        f"{missing[0][1]}"
                    )
            if self.train and stage.ended != ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]:
                one = self.count == 1 and stage.ended == ["ReduceGrads", "OptimizerStep"]
                if not one:
                    raise ScheduleError(
                        f"stage {number} ends with {stage.ended}, not two reductions and a step"
                    )
            if self.train and stage.spans and stage.ended and stage.live:
                raise ScheduleError(
                    f"stage {number} keeps the activations of {stage.live} micro-batches"
                )
        if left := [(wire, list(messages)) for wire, messages in self.wires.items() if messages]:
            raise ScheduleError(
                f"sent from stage {left[0][0][0]} to {left[0][0][1]} and never received: "
                f"{left[0][1][0]}"
            )

    def _wrong(self, number: int, what: PipeInstruction, why: str) -> ScheduleError:
        return ScheduleError(f"stage {number}, {what}: {why}")

    def proof(self) -> ScheduleProof:
        """What the run was like."""
        spans = tuple(tuple(s.spans) for s in self.stages)
        begin = min(s.start for stage in spans for s in stage)
        makespan = max(s.stop for stage in spans for s in stage) - begin
        busy = sum(s.stop - s.start for stage in spans for s in stage)
        bubble = 1 - busy / (makespan * self.count)
        return ScheduleProof(makespan, bubble, tuple(s.most for s in self.stages), spans)
