"""Pipeline schedules as data: what each stage does, step by step (no torch, no communication).

A schedule belongs to one stage and yields lists of instructions. `TrainSchedule`,
`InferenceSchedule` and `DataParallelSchedule` are the documented ones, in the documented order;
`planned.py` has the others. Anybody may write another: subclass `PipeSchedule`, implement `steps`,
and let `validate.check` prove it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

# -- instructions ----------------------------------------------------------------------------------


class PipeInstruction:
    """One thing that a stage does.

    Keyword arguments become attributes; equal when name and arguments are.
    """

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PipeInstruction) and (self.name, self.kwargs) == (
            other.name,
            other.kwargs,
        )

    def __hash__(self) -> int:
        return hash((self.name, tuple(sorted(self.kwargs.items()))))

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.kwargs.items())})"


class OptimizerStep(PipeInstruction):
    """Update the weights and drop the gradients, after both reductions."""


class ReduceGrads(PipeInstruction):
    """Average gradients over the data-parallel ranks of this stage."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of tied weights over the stages that share them."""


class BufferOpInstruction(PipeInstruction):
    """Something done to pipeline buffer `buffer_id`, of model chunk `chunk` where a stage has
    several (default 0).
    """

    buffer_id: int
    chunk: int = 0

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Take the next micro-batch: inputs on the first stage, labels on the last."""


class ForwardPass(BufferOpInstruction):
    """outputs = forward(inputs)."""


class BackwardPass(BufferOpInstruction):
    """Backward of the outputs; gradients of weights accumulate."""


class BackwardInput(BufferOpInstruction):
    """The first half of `BackwardPass`: gradients of the inputs, which the stage before waits
    for."""


class BackwardWeight(BufferOpInstruction):
    """The second half: gradients of the weights, for which no other stage waits."""


class SendActivation(BufferOpInstruction):
    """Send the outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive the inputs from the stage before."""


class SendGrad(BufferOpInstruction):
    """Send the gradients of the inputs to the stage before."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradients of the outputs from the next stage."""


# -- schedules -------------------------------------------------------------------------------------


class PipeSchedule(ABC):
    """The work of one stage on one batch.

    micro_batches: M of them.
    stages: S.
    stage_id: which of 0 .. S - 1.
    chunks: parts of the model that each stage has; part c of stage s is number c * S + s in the
        order of the model.
    """

    chunks = 1

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        if micro_batches < 1 or stages < 1 or not 0 <= stage_id < stages:
            raise ValueError(
                f"no schedule for stage {stage_id} of {stages} with {micro_batches} micro-batches"
            )
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Lists of instructions.

        Each is atomic: with a barrier between them nothing can deadlock.
        """

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return self.steps()

    def num_pipe_buffers(self) -> int:
        """Buffers that the stage needs."""
        return self.micro_batches

    @property
    def stage(self) -> int:
        """This stage."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """All stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per batch."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether it takes inputs from the data."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it makes the loss."""
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        """The buffer of a micro-batch."""
        assert self._valid_micro_batch(micro_batch_id)
        return micro_batch_id % self.num_pipe_buffers()


class DataParallelSchedule(PipeSchedule):
    """Plain accumulation: one stage, micro-batches one after the other."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """See `PipeSchedule.steps`."""
        for step in range(self.micro_batches):
            commands: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if step == self.micro_batches - 1:
                commands += [ReduceGrads(), OptimizerStep()]
            yield commands

    def num_pipe_buffers(self) -> int:
        """One."""
        return 1


class InferenceSchedule(PipeSchedule):
    """Forward only, M + S - 1 steps; two buffers take turns: a stage sends the last while it
    receives the next.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """See `PipeSchedule.steps`."""
        for step in range(self.micro_batches + self.stages - 1):
            micro = step - self.stage_id
            turn = step % 2 if self.stage_id % 2 == 0 else (step + 1) % 2
            receives = turn
            sends = (turn + 1) % 2
            commands: list[PipeInstruction] = []
            ends = self.is_first_stage or self.is_last_stage
            if ends and self._valid_micro_batch(micro):
                commands.append(LoadMicroBatch(receives))
            transfers: list[PipeInstruction] = []
            if self._valid_stage(self.next_stage) and self._valid_micro_batch(micro - 1):
                transfers.append(SendActivation(sends))
            if self._valid_stage(self.prev_stage) and self._valid_micro_batch(micro):
                transfers.append(RecvActivation(receives))
            commands += transfers if self.stage_id % 2 == 0 else transfers[::-1]
            if self._valid_micro_batch(micro):
                commands.append(ForwardPass(receives))
            yield commands

    def num_pipe_buffers(self) -> int:
        """Two."""
        return 2


class TrainSchedule(PipeSchedule):
    """1F1B: one forward, one backward, in turn (Narayanan et al., "PipeDream", section 3; with a
    flush per batch).
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """See `PipeSchedule.steps`."""
        previous = -1
        total = 2 * (self.micro_batches + self.stages - 1)
        for step in range(total):
            micro, forward = self._work(step)
            commands = self._transfers(micro, previous, forward)
            if (
                forward
                and (self.is_first_stage or self.is_last_stage)
                and self._valid_micro_batch(micro)
            ):
                commands.append(LoadMicroBatch(self._buffer_idx(micro)))
            if self._valid_micro_batch(micro):
                buffer = self._buffer_idx(micro)
                commands.append(ForwardPass(buffer) if forward else BackwardPass(buffer))
            if step == total - 1:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            previous = micro
            yield commands

    def _transfers(self, micro: int, previous: int, forward: bool) -> list[PipeInstruction]:
        before = self._valid_stage(self.prev_stage)
        after = self._valid_stage(self.next_stage)
        now = self._valid_micro_batch(micro)
        then = self._valid_micro_batch(previous)
        commands: list[PipeInstruction] = []
        if forward:
            if then and before:
                commands.append(SendGrad(self._buffer_idx(previous)))
            if now and before:
                commands.append(RecvActivation(self._buffer_idx(micro)))
        else:
            if now and after:
                commands.append(RecvGrad(self._buffer_idx(micro)))
            if then and after:
                commands.append(SendActivation(self._buffer_idx(previous)))
        return commands

    def _work(self, step: int) -> tuple[int, bool]:
        """(micro-batch, whether it is a forward) at `step`; an id out of range means idle."""
        stage = self.stage_id
        stages = self.stages
        if step % 2 == stage % 2:
            return step // 2 - stage // 2, True
        if step % 2 == 0:
            return step // 2 - stages + (stage + 1) // 2, False
        return (step - 1) // 2 - stages + 1 + stage // 2, False

    def num_pipe_buffers(self) -> int:
        """As many as there are micro-batches under way at a time, and at least two."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))
