"""Computes a recorded step again: the same forwards and backwards, in the same order, through the
engine's own gradient hooks and partitioner, so that gradients are accumulated and reduced as they
were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_core.errors import UsageError
from ds_core.gradients import BackwardPlan
from ds_core.precision import forward_context
from ds_numerics.events import Backward, Event, Forward, RandomStates, cut_off
from ds_numerics.trace import Checksums, Kind, Trace, lacking

if TYPE_CHECKING:
    from ds_core.gradients import Gradients, GradientShard
    from ds_numerics.recording import Recording


class Passes:
    """The passes of one step: the first, and those that `run` makes.

    gradients: of the first pass. Their shards are, after each pass, what the optimizer will use.
    """

    def __init__(self, recording: Recording, gradients: Gradients) -> None:
        self._recording = recording
        self._shards = list(gradients.shards)
        # A replay may use the memory in which the first pass's gradients are.
        self._first = [shard.tensor.clone() for shard in self._shards]
        self._traces = [recording.trace.read()]
        # The buffers that the last pass left.
        self._buffers: dict[str, Tensor] = {}

    @property
    def checksums(self) -> list[Checksums]:
        """Of three passes; the last one stands for one that was not made."""
        return [*self._traces, *self._traces[-1:] * (3 - len(self._traces))]

    @property
    def other_operations(self) -> bool:
        """Whether the first replay has checksums of something else than the first pass."""
        return any(True for _ in lacking(self._traces[0], self._traces[1]))

    def run(self) -> None:
        """Drop the step's gradients and compute them again.

        Random states and buffers are afterwards as they were before. Collective.
        """
        recording = self._recording
        partitioner = recording.ctx.engine.partitioner
        partitioner.zero_grad()
        with _states_kept(recording), recording.next_pass() as trace, torch.enable_grad():
            for place, event in enumerate(recording.events):
                if isinstance(event, Forward):
                    _forward(recording, event)
                else:
                    _backward(recording, event, _used_later(recording.events, place))
            partitioner.finish(BackwardPlan(reduce=True))
            self._buffers = _copies_of_buffers(recording)
        partitioner.gradients()
        shards = list(partitioner.gradient_shards())
        add_reduced(trace, shards)
        self._traces.append(trace.read())
        self._follow(shards)

    def _follow(self, shards: Sequence[GradientShard]) -> None:
        """Let the tensors that the core and other plugins have be those of the new pass."""
        pairs = [(shard.name, shard.start, shard.stop) for shard in shards]
        if pairs != [(shard.name, shard.start, shard.stop) for shard in self._shards]:
            raise UsageError(
                "numerics: the replay gave gradients of other parameters than the step"
            )
        for old, new in zip(self._shards, shards, strict=True):
            old.tensor.data = new.tensor

    def give_last(self) -> None:
        """Let the step be what the last pass gave, with its running statistics too."""
        self._recording.buffers.restore(self._buffers)

    def give_first(self) -> None:
        """Let the optimizer use what the first pass gave."""
        for shard, first in zip(self._shards, self._first, strict=True):
            shard.tensor.copy_(first)


def add_reduced(trace: Trace, shards: Iterable[GradientShard]) -> None:
    """Add the reduced gradients of this rank."""
    for shard in shards:
        trace.add(Kind.REDUCED, shard.name, shard.tensor)


@contextlib.contextmanager
def _states_kept(recording: Recording) -> Iterator[None]:
    """Inside, random states and buffers are those of the replay."""
    states = RandomStates.now(recording.ctx)
    buffers = _copies_of_buffers(recording)
    try:
        yield
    finally:
        states.restore()
        recording.buffers.restore(buffers)


def _copies_of_buffers(recording: Recording) -> dict[str, Tensor]:
    return {n: b.detach().clone() for n, b in recording.module.named_buffers()}


def _forward(recording: Recording, event: Forward) -> None:
    recording.buffers.restore(event.buffers)
    event.random.restore()
    ctx = recording.ctx
    context = forward_context(ctx.precision, ctx.accelerator) or contextlib.nullcontext()
    args = cut_off(event.args)
    kwargs = cut_off(event.kwargs)
    with context:
        # Not through the engine, whose observers would count one forward more.
        recording.module(*args, **kwargs)


def _backward(recording: Recording, event: Backward, retain: bool) -> None:
    roots: list[Tensor] = []
    gradients: list[Tensor] = []
    for (forward, number), gradient in event.gradients.items():
        roots.append(recording.outputs(forward)[number])
        gradients.append(gradient.tensor)
    event.random.restore()
    engine = recording.ctx.engine
    engine.partitioner.gradient_hooks.run(
        lambda: torch.autograd.backward(roots, gradients, retain_graph=retain),
        engine.loss_factor(),
        plan=event.plan,
    )


def _used_later(events: Sequence[Event], place: int) -> bool:
    """Whether a later backward comes through the graph of a forward of this one."""
    event = events[place]
    assert isinstance(event, Backward)
    mine = {forward for forward, _ in event.gradients}
    return any(
        forward in mine
        for later in events[place + 1 :]
        if isinstance(later, Backward)
        for forward, _ in later.gradients
    )
