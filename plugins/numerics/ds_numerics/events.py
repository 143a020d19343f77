"""What a step did, as it can be done again: forwards and backwards in order, with the random states
and buffers that each began with.

Inputs and gradients are kept by reference. One that the program changes in place before the step
makes the step unrepeatable; torch's version counters tell.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.random_streams import SOURCES, STREAMS, RandomSource, Snapshot
from torch import Tensor, nn

from ds_core.gradients import BackwardPlan
from ds_core.nested import map_leaves

if TYPE_CHECKING:
    from ds_core.context import Context


@dataclass(frozen=True, slots=True)
class RandomStates:
    """The states of torch's generators, named streams, Python's generator and numpy's, and of the
    engine's `SOURCES`.
    """

    streams: Snapshot
    python: Any
    numpy: Any
    sources: tuple[tuple[RandomSource, Any], ...]

    @staticmethod
    def now(ctx: Context) -> RandomStates:
        """As they are."""
        numpy = sys.modules.get("numpy")
        state = numpy.random.get_state() if numpy is not None else None
        sources = tuple((source, source.state()) for source in ctx.stash.get(SOURCES) or ())
        return RandomStates(STREAMS.snapshot(), random.getstate(), state, sources)

    def restore(self) -> None:
        """Go on from here."""
        STREAMS.go_on_from(self.streams)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        for source, state in self.sources:
            source.go_on_from(state)


@dataclass(frozen=True, slots=True)
class Kept:
    """A tensor that is kept by reference."""

    tensor: Tensor
    version: int

    @staticmethod
    def of(tensor: Tensor) -> Kept:
        """`tensor` as it is now."""
        return Kept(tensor, version_of(tensor))

    @property
    def changed(self) -> bool:
        """Whether somebody has written to it."""
        return version_of(self.tensor) != self.version


@dataclass(slots=True)
class Forward:
    """One forward of the whole model."""

    args: Any
    kwargs: Any
    kept: list[Kept]
    """The tensors of `args` and `kwargs`."""
    random: RandomStates
    buffers: dict[str, Tensor]
    """Copies of the buffers that have changed since the last forward."""


@dataclass(slots=True)
class Backward:
    """One backward, from the gradients of the model's outputs."""

    plan: BackwardPlan
    random: RandomStates
    gradients: dict[tuple[int, int], Kept] = field(default_factory=dict)
    """By the number of the forward and of the output."""


Event = Forward | Backward


class Buffers:
    """Follows a model's buffers from forward to forward, to copy what has changed."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        # By name: the tensor and its version when it was last looked at.
        self._seen: dict[str, Kept] = {}

    @torch.no_grad()
    def copies(self) -> dict[str, Tensor]:
        """Copies of those that have changed since the last `look`; of all at first."""
        return {
            name: buffer.detach().clone()
            for name, buffer in self._module.named_buffers()
            if name not in self._seen
            or self._seen[name].tensor is not buffer
            or self._seen[name].changed
        }

    def look(self) -> None:
        """Remember them as they are."""
        self._seen = {name: Kept.of(buffer) for name, buffer in self._module.named_buffers()}

    @torch.no_grad()
    def restore(self, copies: Mapping[str, Tensor]) -> None:
        """Write the copies back."""
        present = dict(self._module.named_buffers())
        for name, copy in copies.items():
            if name in present:
                present[name].copy_(copy)


def version_of(tensor: Tensor) -> int:
    """How often `tensor` was written to; those of inference mode are never."""
    return 0 if tensor.is_inference() else int(tensor._version)


def cut_off(value: Any) -> Any:
    """Inputs without the graph they come from, which has been used; a gradient ends at them."""

    def cut(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        return leaf.detach().requires_grad_()

    return map_leaves(cut, value)
