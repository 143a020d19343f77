"""Which elements of the whole tensor a rank has: the indices of each dimension.

Dimension 0 of a model's tensors holds samples, and they are the samples of the step's whole batch.
Where ranks divide a layer (tensor parallelism) or the sequence, one dimension more is a part. Which
one follows from shapes: a width, a number of heads or of positions that is this rank's. What could
be one or the other is refused, since a wrong guess would show nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_core.errors import UsageError
from ds_reproducibility.counter import Grid

Ranges = tuple[tuple[int, int], ...]
"""(first, size) of the indices of one dimension, one range after the other."""

HEADS = "num_attention_heads", "num_heads", "n_heads", "n_head"
"""Attributes in which modules, or their configs, count query heads."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one forward in their step's batch."""

    count: int
    """In this forward."""
    first: int
    """The number of the first one."""
    stride: int = 1
    """From one to the next."""
    dim: int = 0
    """The dimension of the model's tensors that holds them."""

    def ranges(self) -> Ranges:
        """Their numbers."""
        if self.stride == 1:
            return ((self.first, self.count),)
        return tuple((self.first + self.stride * i, 1) for i in range(self.count))


@dataclass(frozen=True, slots=True)
class Positions:
    """This rank's part of the sequence; `ranks` share the heads inside of attention."""

    length: int
    ranges: Ranges
    rank: int
    ranks: int

    @property
    def local(self) -> int:
        """Positions that are here."""
        return sum(size for _, size in self.ranges)


@dataclass(frozen=True, slots=True)
class Place:
    """What is known of where a tensor is.

    outputs: of the divided layers before it, the ranges of outputs that are here; () outside.
    heads: numbers of heads that the modules around name.
    """

    samples: Samples
    sequence: Positions | None = None
    outputs: tuple[Ranges, ...] = ()
    heads: tuple[int, ...] = ()

    def grid(self, shape: Sequence[int], device: torch.device) -> Grid:
        """The elements of a tensor of that shape.

        Raises UsageError where it cannot be told which of the whole they are.
        """
        return Grid([_indices(r, device) for r in self.ranges(tuple(shape))]).reshaped(shape)

    def ranges(self, shape: tuple[int, ...]) -> list[Ranges]:
        """The ranges of each dimension; of one more where samples share dimension 0 with others."""
        samples = self.samples
        shape = tuple(shape)
        if len(shape) > samples.dim and shape[samples.dim] == samples.count:
            found = self._rest(shape, samples.dim)
            found[samples.dim] = samples.ranges()
            return found
        # Flattened: samples times tokens, samples times heads.
        if shape and samples.count and shape[0] % samples.count == 0:
            inner = (samples.count, shape[0] // samples.count, *shape[1:])
            found = self._rest(inner, 0)
            found[0] = samples.ranges()
            return found
        # No dimension of samples: weights, or one number for the micro-batch. The number of the
        # first sample tells micro-batches apart.
        if (self.outputs or self.sequence is not None) and math.prod(shape) > 1:
            raise _unclear(shape, f"it has no dimension of the {samples.count} samples")
        return [((samples.first, 1),), *(((0, size),) for size in shape)]

    def _rest(self, shape: tuple[int, ...], dim: int) -> list[Ranges]:
        """The ranges of all dimensions but `dim`, which the caller knows."""
        found: list[Ranges] = [((0, size),) for size in shape]
        others = [d for d in range(len(shape)) if d != dim and shape[d] != 1]
        if not others or not (self.outputs or self.sequence is not None):
            return found
        # Scores of attention: samples, heads, queries, keys.
        if len(shape) == 4 and dim == 0 and self._is_scores(shape):
            found[1] = self._heads(shape)
            if self.sequence is not None and shape[2] != self.sequence.length:
                found[2] = self.sequence.ranges
            return found
        along = self._positions(shape, others)
        if along is not None and self.sequence is not None:
            found[along] = self.sequence.ranges
            others.remove(along)
        if self.outputs and others:
            last = len(shape) - 1
            width = next((o for o in self.outputs if _size(o) == shape[last]), None)
            if width is None or last not in others:
                widths = ", ".join(str(_size(o)) for o in self.outputs)
                raise _unclear(shape, f"the layers before it have {widths} outputs on this rank")
            found[last] = width
        return found

    def _is_scores(self, shape: tuple[int, ...]) -> bool:
        if self.sequence is None:
            return True
        return shape[3] == self.sequence.length and shape[2] in (shape[3], self.sequence.local)

    def _positions(self, shape: tuple[int, ...], others: list[int]) -> int | None:
        """The dimension that holds positions: the first one after the samples'."""
        if self.sequence is None:
            return None
        along = others[0]
        if shape[along] == self.sequence.local:
            return along
        # Samples and features: there are no tokens in it.
        if len(others) == 1 and len(shape) == 2:
            return None
        raise _unclear(
            shape,
            f"dimension {along} is not the {self.sequence.local} positions that this rank has",
        )

    def _heads(self, shape: tuple[int, ...]) -> Ranges:
        """Of scores: the heads that this rank has."""
        count = shape[1]
        first = 0
        sequence = self.sequence
        exchanged = sequence is not None and shape[2] == sequence.length
        shares = sequence.ranks if sequence is not None and exchanged else 1
        if self.outputs:
            # Heads are divided as the outputs of the layer that makes queries are.
            begin, size = self.outputs[0][0]
            if size % (count * shares) or begin * count * shares % size:
                why = f"{count * shares} heads do not divide outputs {begin} to {begin + size}"
                raise _unclear(shape, why)
            first = begin * count * shares // size
        if sequence is not None and exchanged:
            # Inside of Ulysses' exchange each rank has some heads of the whole sequence.
            if count * shares not in self.heads:
                named = ", ".join(map(str, self.heads)) or "none"
                raise _unclear(
                    shape,
                    f"{count} heads on each of {shares} ranks are not the heads that the modules "
                    f"around name ({named}); give the attention module an attribute num_heads, "
                    f"which {shares} divides",
                )
            first += sequence.rank * count
        return ((first, count),)


def _size(ranges: Ranges) -> int:
    return sum(size for _, size in ranges)


def _indices(ranges: Ranges, device: torch.device) -> Tensor:
    if len(ranges) == 1:
        first, size = ranges[0]
        return torch.arange(first, first + size, device=device)
    parts = [torch.arange(first, first + size) for first, size in ranges]
    return torch.cat(parts).to(device)


def _unclear(shape: Sequence[int], why: str) -> UsageError:
    return UsageError(
        f"reproducibility: it is unclear which elements of the full tensor the random numbers of "
        f"shape {tuple(shape)} are for: {why}"
    )
