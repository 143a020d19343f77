"""Parameters of which this rank holds a slice: some rows (dimension 0) of a whole one, of the same name.

Training needs nothing of this, since param axes say all of it; checkpoints and exports do. There such a parameter, and
each state of its optimizer with one value per element, is the whole one, so that a run in which the axis is longer or
shorter, or a model that was never cut, can read it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_core.stash import StashKey

if TYPE_CHECKING:
    from ds_core.mesh import Mesh
    from ds_core.partition import StateTensor

__all__ = ["SLICES", "Slice", "as_wholes"]


@dataclass(frozen=True, slots=True)
class Slice:
    """What of a whole parameter this rank holds.

    axis: the mesh axis along which ranks hold the other rows; it must be among the param axes. shape: of the whole.
    first: the first row held here. rows: how many.
    """

    axis: str
    shape: tuple[int, ...]
    first: int
    rows: int

    def local(self) -> tuple[int, ...]:
        """The shape of what this rank holds."""
        return (self.rows, *self.shape[1:])

    @property
    def offset(self) -> int:
        """Where this rank's elements begin in the row-major flattened whole."""
        return self.first * math.prod(self.shape[1:])


SLICES: StashKey[Mapping[str, Slice]] = StashKey("slices")
"""Parameter name -> its slice. A transform that leaves each rank some rows stashes it (adding to what is there)."""


def param_of(state: str) -> str:
    """The parameter whose state this is: ``"optimizer/exp_avg/a.b"`` -> ``"a.b"``."""
    return state.split("/", 2 if state.startswith("optimizer/") else 1)[-1]


def as_wholes(states: Iterable[StateTensor], slices: Mapping[str, Slice] | None, mesh: Mesh) -> Iterator[StateTensor]:
    """`states` as checkpoints are to have them: each slice is a range of the whole.

    A state of one value (a step counter), which is the same for all slices, is stored once. One of another shape stays
    the rank's own.
    """
    for state in states:
        piece = slices.get(param_of(state.name)) if slices else None
        if piece is None or (state.shape and state.shape != piece.local()):
            yield state
            continue
        held = tuple(axis for axis in state.held if axis != piece.axis)
        if state.shape:
            start, stop = state.start + piece.offset, state.stop + piece.offset
            yield dataclasses.replace(state, shape=piece.shape, start=start, stop=stop, held=held)
        else:
            first = mesh.size(piece.axis) == 1 or mesh.index(piece.axis) == 0
            yield dataclasses.replace(state, held=held, store=state.store and first)
