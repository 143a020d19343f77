"""Interleaved 1F1B and zero bubble, for any number of micro-batches, stages and chunks.

Each schedule gives the order of a stage's forwards and backwards (`_Planned.ops`); transfers and
buffers follow from it. `validate.check` proves the orders.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ds_pipeline.schedules.schedule import (
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


class Op(NamedTuple):
    """BatchRequest of one stage.

    kind: "F", "B" (with the weights' part unless the plan splits it) or "W".
    """

    kind: str
    micro: int
    chunk: int


class _PlannedSchedule(PipeSchedule):
    """A schedule that is an order of forwards and backwards."""

    @abstractmethod
    def ops(self) -> Sequence[Op]:
        """This stage's work in order."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """One step per piece of work, with what must come before and after it."""
        buffers = _Buffers(self.chunks)
        kinds = self.ops()
        split = any(op.kind == "W" for op in kinds)
        train = any(op.kind == "B" for op in kinds)
        for index, op in enumerate(kinds):
            commands = self._commands(op, buffers, split)
            if not train:
                buffers.give(op.micro, op.chunk)
            elif index == len(kinds) - 1:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield commands

    def _commands(self, op: Op, buffers: _Buffers, split: bool) -> list[PipeInstruction]:
        part = op.chunk * self.stages + self.stage_id
        first = part == 0
        last = part == self.stages * self.chunks - 1
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
        kinds = {op.kind for op in self.ops()}
        split = "W" in kinds
        for op in self.ops():
            if op.kind == "F":
                buffers.take(op.micro, op.chunk)
                if kinds == {"F"}:
                    buffers.give(op.micro, op.chunk)
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


class InterleavedSchedule(_PlannedSchedule):
    """1F1B over several chunks per stage, which divides the bubble by their number (Narayanan et
    al. 2021, 2.2).

    The bubble is that small when micro-batches are a multiple of the stages; any other number works
    too.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int, chunks: int = 2) -> None:
        super().__init__(micro_batches, stages, stage_id)
        if chunks < 1:
            raise ValueError(f"a stage cannot have {chunks} chunks")
        self.chunks = chunks

    def ops(self) -> Sequence[Op]:
        """Forwards until the first gradient can be there, then one of each in turn."""
        # Planned for a multiple of the stages; leaving out all work of a micro-batch cannot block
        # the others.
        padded = -(-self.micro_batches // self.stages) * self.stages
        forwards = [Op("F", m, c) for m, c in self._order(padded, range(self.chunks))]
        backwards = [Op("B", m, c) for m, c in self._order(padded, range(self.chunks - 1, -1, -1))]
        ahead = self.stages - self.stage_id - 1
        warm = min(
            len(forwards),
            ahead if self.chunks == 1 else 2 * ahead + (self.chunks - 1) * self.stages,
        )
        turns = [op for pair in zip(forwards[warm:], backwards, strict=False) for op in pair]
        ops = (*forwards[:warm], *turns, *backwards[len(forwards) - warm :])
        return [op for op in ops if op.micro < self.micro_batches]

    def _order(self, micro_batches: int, chunks: range) -> Iterator[tuple[int, int]]:
        """(micro-batch, chunk): S micro-batches through one chunk, then the same through the
        next."""
        for begin in range(0, micro_batches, self.stages):
            for chunk in chunks:
                for micro in range(begin, begin + self.stages):
                    yield micro, chunk


class ZeroBubbleSchedule(_PlannedSchedule):
    """Backward in two halves; gradients of weights fill what would be idle (Qi et al. 2023, "Zero
    Bubble Pipeline Parallelism", ZB-H1).

    1F1B, with the weights' half of stage s delayed by s micro-batches: so the other half, which the
    stage before waits for, begins earlier, and the end, which was idle, has something to do. The
    bubble is a third of 1F1B's when all three parts take equally long; a stage keeps what belongs
    to up to S + 1 micro-batches.
    """

    def ops(self) -> Sequence[Op]:
        """See the class's docstring."""
        warm = min(self.stages - self.stage_id, self.micro_batches)
        ops = [Op("F", m, 0) for m in range(warm)]
        for micro in range(self.micro_batches):
            ops.append(Op("B", micro, 0))
            if micro + warm < self.micro_batches:
                ops.append(Op("F", micro + warm, 0))
            if micro >= self.stage_id:
                ops.append(Op("W", micro - self.stage_id, 0))
        delayed = range(max(0, self.micro_batches - self.stage_id), self.micro_batches)
        return ops + [Op("W", m, 0) for m in delayed]


class InterleavedInferenceSchedule(InterleavedSchedule):
    """Forward only, over several chunks per stage, in the order of training."""

    def ops(self) -> Sequence[Op]:
        """See the class's docstring."""
        return [op for op in super().ops() if op.kind == "F"]
