"""The validator against a simulated run: it accepts a schedule if and only if carrying it out gives
the right weights.

The simulation knows nothing of the validator. It does what the runner does, with numbers in the
place of tensors: part p of the model multiplies by w_p, the loss of micro-batch m is label_m times
the last output.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ds_pipeline.schedules.choose import make_schedule
from ds_pipeline.schedules.schedule import PipeInstruction, PipeSchedule
from ds_pipeline.schedules.validate import ScheduleError, check
from hypothesis import given, settings
from hypothesis import strategies as st


class Stuck(Exception):
    """Nobody can go on."""


class Wrong(Exception):
    """A stage has not got what it needs."""


class Stage:
    """One stage, as a generator that yields while it waits."""

    def __init__(self, schedule: PipeSchedule, wires: dict[Any, deque[Any]]) -> None:
        self.schedule = schedule
        self.wires = wires
        self.me = schedule.stage_id
        self.stages = schedule.num_stages
        self.chunks = schedule.chunks
        self.parts = self.stages * self.chunks
        self.grads = dict.fromkeys(range(self.me, self.parts, self.stages), 0.0)
        self.used = dict.fromkeys(self.grads, 0)
        self.slots: dict[tuple[int, int], dict[str, Any]] = {}
        self.loaded = [0] * self.chunks
        self.ends: list[str] = []
        self.done = 0

    def run(self) -> Iterator[None]:
        limit = self.schedule.num_pipe_buffers()
        for step in self.schedule.steps():
            for what in step:
                self.done += 1
                if not hasattr(what, "buffer_id"):
                    self.ends.append(what.name)
                    continue
                if what.buffer_id >= limit or what.chunk >= self.chunks:
                    raise Wrong
                part = what.chunk * self.stages + self.me
                buffer = self.slots.setdefault((what.chunk, what.buffer_id), {})
                if what.name.startswith("Recv"):
                    yield from self.receive(what.name, part, buffer)
                else:
                    getattr(self, what.name)(what, part, buffer)

    def take(self, buffer: dict[str, Any], key: str, *, keep: bool = False) -> Any:
        if key not in buffer:
            raise Wrong(key)
        return buffer[key] if keep else buffer.pop(key)

    def receive(self, name: str, part: int, buffer: dict[str, Any]) -> Iterator[None]:
        act = name == "RecvActivation"
        source = part - 1 if act else part + 1
        if not 0 <= source < self.parts:
            raise Wrong
        wire = self.wires.setdefault((source % self.stages, self.me, act), deque())
        while not wire:
            yield
        target, micro, value = wire.popleft()
        if target != part:
            raise Wrong
        if act:
            self.fresh(buffer)
            buffer.update(x=value, micro=micro)
        elif buffer.get("micro") != micro:
            raise Wrong
        else:
            buffer["g"] = value

    def fresh(self, buffer: dict[str, Any]) -> None:
        """A new micro-batch comes in; what is lost now nobody will ever compute."""
        if {"out", "later"} & buffer.keys():
            raise Wrong
        for key in buffer.keys() - {"label"}:
            del buffer[key]

    def LoadMicroBatch(self, what: Any, part: int, buffer: dict[str, Any]) -> None:
        micro = self.loaded[what.chunk]
        self.loaded[what.chunk] += 1
        if micro >= self.schedule.num_micro_batches or part not in (0, self.parts - 1):
            raise Wrong
        if part == 0:
            self.fresh(buffer)
            buffer.update(x=1.0 + micro, micro=micro)
        if part == self.parts - 1:
            buffer["label"] = 10.0**micro

    def ForwardPass(self, what: Any, part: int, buffer: dict[str, Any]) -> None:
        if self.ends:
            raise Wrong
        buffer["saved"] = self.take(buffer, "x")
        buffer["out"] = buffer["saved"] * (2.0 + part)
        if part == self.parts - 1:
            buffer["g"] = self.take(buffer, "label", keep=True)

    def SendActivation(self, what: Any, part: int, buffer: dict[str, Any]) -> None:
        self.send(
            part + 1,
            self.take(buffer, "micro", keep=True),
            self.take(buffer, "out", keep=True),
            act=True,
        )

    def BackwardInput(self, what: Any, part: int, buffer: dict[str, Any]) -> None:
        if self.ends:
            raise Wrong
        self.take(buffer, "out")
        g = self.take(buffer, "g")
        saved = self.take(buffer, "saved")
        buffer["later"] = g * saved
        if part > 0:
            buffer["dx"] = g * (2.0 + part)

    def BackwardWeight(self, what: Any, part: int, buffer: dict[str, Any]) -> None:
        if self.ends:
            raise Wrong
        self.grads[part] += self.take(buffer, "later")
        self.used[part] += 1

    def BackwardPass(self, what: Any, part: int, buffer: dict[str, Any]) -> None:
        self.BackwardInput(what, part, buffer)
        self.BackwardWeight(what, part, buffer)

    def SendGrad(self, what: Any, part: int, buffer: dict[str, Any]) -> None:
        self.send(
            part - 1, self.take(buffer, "micro", keep=True), self.take(buffer, "dx"), act=False
        )

    def send(self, target: int, micro: int, value: float, *, act: bool) -> None:
        if not 0 <= target < self.parts:
            raise Wrong
        self.wires.setdefault((self.me, target % self.stages, act), deque()).append(
            (target, micro, value)
        )


def simulate(make: Callable[[int], PipeSchedule]) -> bool:
    """Whether all stages finish, with the gradients that one process would have."""
    wires: dict[Any, deque[Any]] = {}
    count = make(0).num_stages
    stages = [Stage(make(i), wires) for i in range(count)]
    going = {stage: stage.run() for stage in stages}
    try:
        while going:
            before = (sum(s.done for s in stages), len(going))
            for stage in list(going):
                try:
                    next(going[stage])
                except StopIteration:
                    del going[stage]
            if before == (sum(s.done for s in stages), len(going)):
                raise Stuck
    except (Wrong, Stuck):
        return False
    micros = stages[0].schedule.num_micro_batches
    parts = stages[0].parts
    product = math.prod(2.0 + p for p in range(parts))
    total = sum((1.0 + m) * 10.0**m for m in range(micros))
    done = all(
        math.isclose(grad, total * product / (2.0 + part), rel_tol=1e-9)
        and stage.used[part] == micros
        for stage in stages
        for part, grad in stage.grads.items()
    )
    ends = ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
    # one stage ties to nobody
    ended = all(s.ends in ([ends, ends[1:]] if count == 1 else [ends]) for s in stages)
    return done and ended and not any(wires.values())


def accepts(make: Callable[[int], PipeSchedule]) -> bool:
    try:
        check(make)
    except ScheduleError:
        return False
    return True


class Changed(PipeSchedule):
    """A schedule in one of whose stages one instruction is left out, doubled, or changes places
    with the next.
    """

    def __init__(self, base: PipeSchedule, how: str, at: int) -> None:
        super().__init__(base.micro_batches, base.stages, base.stage_id)
        self.base = base
        self.chunks = base.chunks
        self.how = how
        self.at = at

    def num_pipe_buffers(self) -> int:
        return self.base.num_pipe_buffers()

    def steps(self) -> Iterator[list[PipeInstruction]]:
        whole = [what for step in self.base.steps() for what in step]
        at = self.at % len(whole)
        if self.how == "left out":
            del whole[at]
        elif self.how == "doubled":
            whole.insert(at, whole[at])
        else:
            whole[at : at + 2] = whole[at : at + 2][::-1]
        yield whole


names = st.sampled_from(["1f1b", "interleaved", "zero_bubble"])
micros = st.integers(1, 9)
stages = st.integers(1, 6)
chunks = st.integers(1, 4)


@settings(deadline=None)
@given(names, micros, stages, chunks)
def test_every_schedule_is_accepted_and_right(name: str, m: int, s: int, c: int) -> None:
    def make(stage: int) -> PipeSchedule:
        return make_schedule(name, m, s, stage, c if name == "interleaved" else 1)

    assert simulate(make)
    assert accepts(make)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(names, st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.data())
def test_validator_and_simulation_agree_about_changed_schedules(
    name: str, m: int, s: int, c: int, data: st.DataObject
) -> None:
    where = data.draw(st.integers(0, s - 1))
    how = data.draw(st.sampled_from(["left out", "doubled", "changed places"]))
    at = data.draw(st.integers(0, 200))

    def make(stage: int) -> PipeSchedule:
        base = make_schedule(name, m, s, stage, c if name == "interleaved" else 1)
        return Changed(base, how, at) if stage == where else base

    assert simulate(make) == accepts(make)


def test_the_simulation_can_fail() -> None:
    def make(stage: int) -> PipeSchedule:
        base = make_schedule("1f1b", 3, 2, stage)
        return Changed(base, "left out", 3) if stage == 1 else base

    assert not simulate(make)
    with pytest.raises(ScheduleError):
        check(make)
