"""Schedules beyond the documents: interleaved 1F1B and zero bubble, for any number of micro-batches, stages and chunks.

Both come out of one event simulation (`plan`): every stage, when free, takes the work that is ready and that its policy
likes best. So each order is one that has run, in the simulation, and cannot deadlock; and it is the same on all ranks.

[Note: limits] A stage may hold at most so many activations. Where a limit would leave every stage waiting, it is raised
by one and the plan made anew.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_pipeline.schedule import (
    BackwardInput,
    BackwardPass,
    BackwardWeight,
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

__all__ = ["InterleavedSchedule", "Op", "ZeroBubbleSchedule", "plan"]


class Op(NamedTuple):
    """Work of one stage. kind: "F", "B" (with the weights' part unless the plan splits it) or "W"."""

    kind: str
    micro: int
    chunk: int


@dataclass(frozen=True, slots=True)
class _Rules:
    """What a plan is for. cost: of F, B and W in units of time; limits: activations that each stage may hold."""

    micro_batches: int
    stages: int
    chunks: int
    split: bool
    limits: tuple[int, ...]

    @property
    def cost(self) -> dict[str, int]:
        return {"F": 1, "B": 1, "W": 1} if self.split else {"F": 1, "B": 2}


class _Stuck(Exception):
    """No stage has anything it may do."""


class _Stage:
    """One stage of the simulation."""

    def __init__(self, rules: _Rules, stage: int) -> None:
        self.rules, self.stage = rules, stage
        self.ops: list[Op] = []
        self.free_at = 0
        self.live = 0
        self.forwards = list(_order(rules, reverse=False))
        self.backwards = list(_order(rules, reverse=True))
        self.weights: list[Op] = []

    def choose(self, ready: dict[tuple[str, int, int], int], now: int) -> Op | None:
        """The best of what may be done at `now`: what others wait for first, then new work, then weights."""
        backward = self._first(self.backwards, "B", ready, now)
        if backward is not None:
            return backward
        if self.live < self.rules.limits[self.stage]:
            forward = self._first(self.forwards, "F", ready, now)
            if forward is not None:
                return forward
        return self.weights[0] if self.weights else None

    def _first(
        self, order: Sequence[tuple[int, int]], kind: str, ready: dict[tuple[str, int, int], int], now: int
    ) -> Op | None:
        if not order:
            return None
        micro, chunk = order[0]
        part = chunk * self.rules.stages + self.stage
        return Op(kind, micro, chunk) if ready.get((kind, micro, part), now + 1) <= now else None

    def do(self, op: Op, now: int) -> int:
        """Begin `op`; when it ends."""
        self.ops.append(op)
        if op.kind == "F":
            self.forwards.pop(0)
            self.live += 1
        elif op.kind == "B":
            self.backwards.pop(0)
            self.live -= 0 if self.rules.split else 1
            if self.rules.split:
                self.weights.append(Op("W", op.micro, op.chunk))
        else:
            self.weights.pop(0)
            self.live -= 1
        self.free_at = now + self.rules.cost[op.kind]
        return self.free_at

    @property
    def done(self) -> bool:
        return not (self.forwards or self.backwards or self.weights)


def _order(rules: _Rules, *, reverse: bool) -> Iterator[tuple[int, int]]:
    """(micro-batch, chunk) in the order of Narayanan et al. 2021, section 2.2: S micro-batches through each chunk."""
    for begin in range(0, rules.micro_batches, rules.stages):
        group = range(begin, min(begin + rules.stages, rules.micro_batches))
        for chunk in reversed(range(rules.chunks)) if reverse else range(rules.chunks):
            for micro in group:
                yield micro, chunk


@functools.lru_cache(maxsize=64)
def plan(
    micro_batches: int, stages: int, chunks: int, split: bool, limits: tuple[int, ...]
) -> tuple[tuple[Op, ...], ...]:
    """The work of every stage in order. limits: see [Note: limits]."""
    while True:
        try:
            return _simulate(_Rules(micro_batches, stages, chunks, split, limits))
        except _Stuck:
            limits = tuple(n + 1 for n in limits)


def _simulate(rules: _Rules) -> tuple[tuple[Op, ...], ...]:
    stages = [_Stage(rules, s) for s in range(rules.stages)]
    parts = rules.stages * rules.chunks
    ready = {("F", m, 0): 0 for m in range(rules.micro_batches)}
    now, events = 0, [0]
    while not all(s.done for s in stages):
        if not events:
            raise _Stuck
        now = heapq.heappop(events)
        for stage in stages:
            if stage.free_at > now or (op := stage.choose(ready, now)) is None:
                continue
            end = stage.do(op, now)
            part = op.chunk * rules.stages + stage.stage
            if op.kind == "F":
                ready["F" if part + 1 < parts else "B", op.micro, part + 1 if part + 1 < parts else part] = end
            elif op.kind == "B" and part:
                ready["B", op.micro, part - 1] = end
            heapq.heappush(events, end)
    return tuple(tuple(s.ops) for s in stages)


class _Planned(PipeSchedule):
    """A schedule whose order `plan` has made."""

    def ops(self) -> tuple[Op, ...]:
        """This stage's work in order."""
        raise NotImplementedError

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """One step per piece of work, with what must come before and after it."""
        buffers = _Buffers(self.chunks)
        kinds = self.ops()
        split = any(op.kind == "W" for op in kinds)
        for index, op in enumerate(kinds):
            commands = self._commands(op, buffers, split)
            if index == len(kinds) - 1:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield commands

    def _commands(self, op: Op, buffers: _Buffers, split: bool) -> list[PipeInstruction]:
        part = op.chunk * self.stages + self.stage_id
        first, last = part == 0, part == self.stages * self.chunks - 1
        place = {"chunk": op.chunk} if self.chunks > 1 else {}
        if op.kind == "F":
            buffer = buffers.take(op.micro, op.chunk)
            commands: list[PipeInstruction] = [] if first else [RecvActivation(buffer, **place)]
            if first or last:
                commands.append(LoadMicroBatch(buffer, **place))
            commands.append(ForwardPass(buffer, **place))
            return commands if last else [*commands, SendActivation(buffer, **place)]
        buffer = buffers.find(op.micro, op.chunk)
        if op.kind == "W":
            buffers.give(op.micro, op.chunk)
            return [BackwardWeight(buffer, **place)]
        commands = [] if last else [RecvGrad(buffer, **place)]
        commands.append(BackwardInput(buffer, **place) if split else BackwardPass(buffer, **place))
        if not split:
            buffers.give(op.micro, op.chunk)
        return commands if first else [*commands, SendGrad(buffer, **place)]

    def num_pipe_buffers(self) -> int:
        """The most that are in use at a time, of the chunk that needs most."""
        buffers = _Buffers(self.chunks)
        split = any(op.kind == "W" for op in self.ops())
        for op in self.ops():
            if op.kind == "F":
                buffers.take(op.micro, op.chunk)
            elif (op.kind == "W") == split:
                buffers.give(op.micro, op.chunk)
        return buffers.most


class _Buffers:
    """Numbers buffers of each chunk: the smallest that is free."""

    def __init__(self, chunks: int) -> None:
        self._used: list[dict[int, int]] = [{} for _ in range(chunks)]
        self.most = 1

    def take(self, micro: int, chunk: int) -> int:
        used = self._used[chunk]
        number = next(n for n in range(len(used) + 1) if n not in used.values())
        used[micro] = number
        self.most = max(self.most, number + 1)
        return number

    def find(self, micro: int, chunk: int) -> int:
        return self._used[chunk][micro]

    def give(self, micro: int, chunk: int) -> None:
        del self._used[chunk][micro]


class InterleavedSchedule(_Planned):
    """1F1B over several chunks per stage, which divides the bubble by their number (Narayanan et al. 2021, section 2.2).

    A stage holds up to 2 (S - s - 1) + (chunks - 1) S + 1 activations of a chunk's size.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, chunks: int = 2) -> None:
        super().__init__(micro_batches, stages, stage_id)
        if chunks < 1:
            raise ValueError(f"a stage cannot have {chunks} chunks")
        self.chunks = chunks

    def ops(self) -> tuple[Op, ...]:
        """See `_Planned.ops`."""
        s, c = self.stages, self.chunks
        limits = tuple(2 * (s - i - 1) + (c - 1) * s + 1 if c > 1 else s - i for i in range(s))
        return plan(self.micro_batches, s, c, False, limits)[self.stage_id]


class ZeroBubbleSchedule(_Planned):
    """Backward in two halves; gradients of weights fill what would be idle (Qi et al. 2023, "Zero Bubble Pipeline
    Parallelism", ZB-H1).

    extra: activations that a stage may hold beyond those of 1F1B; S - 1 more leave no bubble but the last stage's start
    (ZB-H2).
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, extra: int = 0) -> None:
        super().__init__(micro_batches, stages, stage_id)
        self.extra = extra

    def ops(self) -> tuple[Op, ...]:
        """See `_Planned.ops`."""
        limits = tuple(self.stages - s + self.extra for s in range(self.stages))
        return plan(self.micro_batches, self.stages, 1, True, limits)[self.stage_id]
