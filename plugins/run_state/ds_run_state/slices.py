"""Parameters of which this rank has a slice (some rows, columns, or both) of a full one with the same name.

Training does not need to know, param axes are enough; checkpoints and exports do. They store such a parameter, and each
state of its optimizer with one value per element, as the full tensor, so that a run with another axis size, or a model
that was never sliced, can load it.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_core.context import StashKey

if TYPE_CHECKING:
    from torch import Tensor

    from ds_core.mesh import Mesh
    from ds_run_state.states import StateTensor

__all__ = ["SLICES", "Box", "Slice", "shares", "unslice"]

UNDIVIDED = 1 << 14
"""Pieces with at most this many elements are written by one rank: reading from more files would cost more."""


@dataclass(frozen=True, slots=True)
class Box:
    """A part of an array: the `size[d]` indices from `first[d]` on, of each dimension d."""

    first: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """All of an array."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def slices(self) -> tuple[slice, ...]:
        """The index of this part in an array."""
        return tuple(slice(f, f + n) for f, n in zip(self.first, self.size, strict=True))

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether it is a part of an array of that shape."""
        if not len(self.first) == len(self.size) == len(shape):
            return False
        return all(f >= 0 and n >= 0 and f + n <= s for f, n, s in zip(self.first, self.size, shape, strict=True))


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a full parameter that this rank has.

    shape: of the full parameter. box: the part. axes: the mesh axes along which other ranks have the other parts, which
    form a grid; they must be among the param axes.
    """

    shape: tuple[int, ...]
    box: Box
    axes: tuple[str, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Slice:
        """All of a parameter of that shape, to be `cut`."""
        return cls(tuple(shape), Box.whole(shape), ())

    def cut(self, axis: str, dim: int, first: int, size: int) -> Slice:
        """Keep `size` indices of dimension `dim` from `first` on (of the full parameter); `axis` has the others."""
        low, count = self.box.first[dim], self.box.size[dim]
        if not low <= first <= first + size <= low + count:
            raise ValueError(f"[{first}, {first + size}) of dimension {dim} is not inside [{low}, {low + count})")
        firsts, sizes = list(self.box.first), list(self.box.size)
        firsts[dim], sizes[dim] = first, size
        return Slice(self.shape, Box(tuple(firsts), tuple(sizes)), (*self.axes, axis))

    def take(self, full: Tensor) -> Tensor:
        """A view of this rank's part of `full`, a tensor of the full shape."""
        return full[self.box.slices()]


SLICES: StashKey[Mapping[str, Slice]] = StashKey("slices")
"""Parameter name -> its slice. A transform that leaves each rank a part adds it here."""


def param_of(state: str) -> str:
    """The parameter whose state this is: ``"optimizer/exp_avg/a.b"`` -> ``"a.b"``."""
    return state.split("/", 2 if state.startswith("optimizer/") else 1)[-1]


def unslice(states: Iterable[StateTensor], slices: Mapping[str, Slice] | None, mesh: Mesh) -> Iterator[StateTensor]:
    """`states` as checkpoints store them: a slice is a part of the full tensor.

    A state of one value (a step counter), which is equal for all slices, is stored once. States of any other shape
    stay as they are, one per rank.
    """
    for state in states:
        piece = slices.get(param_of(state.name)) if slices else None
        if piece is None or (state.shape and state.shape != piece.box.size):
            yield state
            continue
        held = tuple(axis for axis in state.held if axis not in piece.axes)
        if not state.shape:
            yield dataclasses.replace(state, held=held, store=state.store and mesh.index(*piece.axes) == 0)
        elif piece.box.size[1:] == piece.shape[1:]:  # rows: a range of the flattened full tensor
            before = piece.box.first[0] * math.prod(piece.shape[1:])
            start, stop = state.start + before, state.stop + before
            yield dataclasses.replace(state, shape=piece.shape, start=start, stop=stop, held=held)
        else:
            yield dataclasses.replace(state, shape=piece.shape, box=piece.box, held=held)


def shares(pieces: Iterable[StateTensor], mesh: Mesh) -> Iterator[StateTensor]:
    """The parts of `pieces` that this rank writes; ranks with identical pieces write equal parts of them.

    Small pieces, and those that are not contiguous (a part of them would need a copy of all), are written by one rank
    each, chosen by name.
    """
    places: dict[tuple[str, ...], tuple[int, int]] = {}
    for piece in pieces:
        if not piece.store:
            continue
        if piece.copies not in places:
            places[piece.copies] = mesh.size(*piece.copies), mesh.index(*piece.copies)
        (count, index), size = places[piece.copies], piece.stop - piece.start
        if count == 1:
            yield piece
        elif size <= UNDIVIDED or not piece.tensor.is_contiguous():
            if zlib.crc32(piece.name.encode()) % count == index:
                yield piece
        else:
            low, high = size * index // count, size * (index + 1) // count
            part = piece.tensor.detach().reshape(-1)[low:high]
            yield dataclasses.replace(piece, tensor=part, start=piece.start + low, stop=piece.start + high)
