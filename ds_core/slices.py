"""Parameters of which this rank holds a slice: some rows, columns, or both, of a whole one of the same name.

Training needs nothing of this, since param axes say all of it; checkpoints and exports do. There such a parameter, and
each state of its optimizer with one value per element, is the whole one, so that a run in which the axis is longer or
shorter, or a model that was never cut, can read it.
"""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_core.boxes import Box
from ds_core.stash import StashKey

if TYPE_CHECKING:
    from torch import Tensor

    from ds_core.mesh import Mesh
    from ds_core.partition import StateTensor

__all__ = ["SLICES", "Slice", "as_wholes", "shares"]

UNDIVIDED = 1 << 14
"""Pieces of at most so many elements are written by one rank: more files to read from would cost more."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What of a whole parameter this rank holds.

    shape: of the whole. box: the part held here. axes: the mesh axes along which ranks hold the others, which together
    form a grid; they must be among the param axes.
    """

    shape: tuple[int, ...]
    box: Box
    axes: tuple[str, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Slice:
        """A whole that nobody has cut yet."""
        return cls(tuple(shape), Box.whole(shape), ())

    def cut(self, axis: str, dim: int, first: int, size: int) -> Slice:
        """Of this, what `axis` leaves here: of dimension `dim`, `size` indices from `first` (of the whole) on."""
        low, count = self.box.first[dim], self.box.size[dim]
        if not low <= first <= first + size <= low + count:
            raise ValueError(f"[{first}, {first + size}) of dimension {dim} is not inside [{low}, {low + count})")
        firsts, sizes = list(self.box.first), list(self.box.size)
        firsts[dim], sizes[dim] = first, size
        return Slice(self.shape, Box(tuple(firsts), tuple(sizes)), (*self.axes, axis))

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of `whole`, a tensor of its shape: a view."""
        return whole[self.box.slices()]


SLICES: StashKey[Mapping[str, Slice]] = StashKey("slices")
"""Parameter name -> its slice. A transform that leaves each rank a part stashes it (adding to what is there)."""


def param_of(state: str) -> str:
    """The parameter whose state this is: ``"optimizer/exp_avg/a.b"`` -> ``"a.b"``."""
    return state.split("/", 2 if state.startswith("optimizer/") else 1)[-1]


def as_wholes(states: Iterable[StateTensor], slices: Mapping[str, Slice] | None, mesh: Mesh) -> Iterator[StateTensor]:
    """`states` as checkpoints are to have them: each slice is a part of the whole.

    A state of one value (a step counter), which is the same for all slices, is stored once. One of another shape stays
    the rank's own.
    """
    for state in states:
        piece = slices.get(param_of(state.name)) if slices else None
        if piece is None or (state.shape and state.shape != piece.box.size):
            yield state
            continue
        held = tuple(axis for axis in state.held if axis not in piece.axes)
        if not state.shape:
            yield dataclasses.replace(state, held=held, store=state.store and mesh.index(*piece.axes) == 0)
        elif piece.box.size[1:] == piece.shape[1:]:  # rows: a range of the whole
            before = piece.box.first[0] * math.prod(piece.shape[1:])
            start, stop = state.start + before, state.stop + before
            yield dataclasses.replace(state, shape=piece.shape, start=start, stop=stop, held=held)
        else:
            yield dataclasses.replace(state, shape=piece.shape, box=piece.box, held=held)


def shares(pieces: Iterable[StateTensor], mesh: Mesh) -> Iterator[StateTensor]:
    """What of `pieces` this rank writes; ranks that hold the same piece write equal parts of it.

    Small pieces, and those that are not contiguous (a part of them would need a copy of the whole), go to one rank
    each, which their names choose.
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
