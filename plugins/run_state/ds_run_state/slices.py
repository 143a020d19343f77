"""Parameters of which this rank has a slice (some rows, columns, or both) of a full one with the
same name.

Training does not need to know, param axes are enough; checkpoints and exports do. They store such a
parameter, and each state of its optimizer with one value per element, as the full tensor, so that a
run with another axis size, or a model that was never sliced, can load it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ds_core.context import StashKey

if TYPE_CHECKING:
    from torch import Tensor

    from ds_core.mesh import Mesh
    from ds_run_state.states import StateTensor

UNDIVIDED = 1 << 14
"""Pieces with at most this many elements are written by one rank: reading from more files would
cost more.
"""


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
        return all(
            f >= 0 and n >= 0 and f + n <= s
            for f, n, s in zip(self.first, self.size, shape, strict=True)
        )


Range = tuple[int, int]
"""The `size` indices of one dimension from `first` on: (first, size)."""


class Part(NamedTuple):
    """A box of a full parameter, and the indices at which it begins in what this rank has."""

    box: Box
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a full parameter that this rank has.

    shape: of the full parameter.
    ranges: of each dimension, those that are here, one after the other; more than one in one
        dimension at most.
    axes: the mesh axes along which other ranks have the other parts, which form a grid; they must
        be among the param axes.
    """

    shape: tuple[int, ...]
    ranges: tuple[tuple[Range, ...], ...]
    axes: tuple[str, ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> Slice:
        """All of a parameter of that shape, to be `cut`."""
        return cls(tuple(shape), tuple(((0, size),) for size in shape), ())

    def cut(self, axis: str, dim: int, first: int, size: int) -> Slice:
        """Keep `size` indices of dimension `dim` from `first` on (of the full parameter); `axis`
        has the others.
        """
        return self.keep(axis, dim, [(first, size)])

    def keep(self, axis: str, dim: int, ranges: Sequence[Range]) -> Slice:
        """Keep these indices of dimension `dim`, one range after the other; `axis` has the others.

        So matrices that are fused in one parameter are cut each: of queries, keys and values, a
        part of each.
        """
        old = self.ranges[dim]
        end = 0
        for first, size in ranges:
            if size < 0 or not any(
                low <= first and first + size <= low + count for low, count in old
            ):
                inside = " or ".join(f"[{low}, {low + count})" for low, count in old)
                raise ValueError(
                    f"[{first}, {first + size}) of dimension {dim} is not inside {inside}"
                )
            if first < end:
                raise ValueError(
                    f"[{first}, {first + size}) of dimension {dim} does not come after {end}"
                )
            end = first + size
        kept = tuple(r for r in ranges if r[1]) or tuple(ranges[:1])
        found = (*self.ranges[:dim], kept, *self.ranges[dim + 1 :])
        if sum(len(r) > 1 for r in found) > 1:
            raise ValueError(
                f"dimension {dim} would be the second one with several ranges: {found}"
            )
        return Slice(self.shape, found, (*self.axes, axis))

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of what this rank has."""
        return tuple(sum(count for _, count in ranges) for ranges in self.ranges)

    @property
    def dim(self) -> int:
        """The dimension with several ranges; -1: none."""
        return next((d for d, ranges in enumerate(self.ranges) if len(ranges) > 1), -1)

    def parts(self) -> Iterator[Part]:
        """The boxes that this rank has, in order: one, or one of each range."""
        ends = [
            itertools.accumulate((count for _, count in ranges), initial=0)
            for ranges in self.ranges
        ]
        for ranges in itertools.product(
            *(zip(r, at, strict=False) for r, at in zip(self.ranges, ends, strict=True))
        ):
            first, size = (tuple(r[i] for r, _ in ranges) for i in (0, 1))
            yield Part(Box(first, size), tuple(at for _, at in ranges))

    def take(self, full: Tensor) -> Tensor:
        """This rank's part of `full`, a tensor of the full shape; a view of it where one box is
        all.
        """
        boxes = [full[part.box.slices()] for part in self.parts()]
        if len(boxes) == 1:
            return boxes[0]
        import torch  # readers of the format need none

        return torch.cat(boxes, self.dim)


SLICES: StashKey[Mapping[str, Slice]] = StashKey("slices")
"""Parameter name -> its slice. A transform that leaves each rank a part adds it here."""


def param_of(state: str) -> str:
    """The parameter whose state this is: ``"optimizer/exp_avg/a.b"`` -> ``"a.b"``."""
    return state.split("/", 2 if state.startswith("optimizer/") else 1)[-1]


def unslice(
    states: Iterable[StateTensor], slices: Mapping[str, Slice] | None, mesh: Mesh
) -> Iterator[StateTensor]:
    """`states` as checkpoints store them: a slice is a part of the full tensor.

    A state of one value (a step counter), which is equal for all slices, is stored once. States of
    any other shape stay as they are, one per rank.
    """
    for state in states:
        piece = slices.get(param_of(state.name)) if slices else None
        if piece is None or (state.shape and state.shape != piece.size):
            yield state
            continue
        held = tuple(axis for axis in state.held if axis not in piece.axes)
        if not state.shape:
            yield dataclasses.replace(
                state, held=held, store=state.store and mesh.index(*piece.axes) == 0
            )
            continue
        for part in piece.parts():
            for found in _inside(state, piece, part) if piece.dim >= 0 else (state,):
                yield _placed(dataclasses.replace(found, shape=piece.shape, held=held), part.box)


def _placed(state: StateTensor, box: Box) -> StateTensor:
    """`state`, a range of flattened `box`, as a range of the flattened full tensor where rows are
    all that is cut.
    """
    if box.size[1:] != state.shape[1:]:
        return dataclasses.replace(state, box=box)
    before = box.first[0] * math.prod(state.shape[1:])
    return dataclasses.replace(state, start=state.start + before, stop=state.stop + before)


def _inside(state: StateTensor, piece: Slice, part: Part) -> Iterator[StateTensor]:
    """What of `state`, a range of what this rank has flattened, is in one of its boxes: ranges of
    that box flattened.

    A row holds one index of each dimension before the one with several ranges. The range may begin
    and end inside a row; what lies between are columns of a matrix. All are views.
    """
    inner = math.prod(piece.size[piece.dim + 1 :])
    row = piece.size[piece.dim] * inner
    low = part.at[piece.dim] * inner
    width = part.box.size[piece.dim] * inner
    start = state.start
    while start < state.stop:
        number, column = divmod(start, row)
        rows = 1 if column or state.stop - start < row else (state.stop - start) // row
        stop = min(start - column + rows * row, state.stop)
        first = max(column, low)
        last = min(stop - start + column if rows == 1 else row, low + width)
        if first < last:
            begin = number * width + first - low
            area = _Area(start - column - state.start, rows, row, first, last)
            yield area.of(state, begin, begin + rows * (last - first))
        start = stop


@dataclass(frozen=True, slots=True)
class _Area:
    """Columns [first, last) of `rows` rows of length `row`; the first row begins `offset` after the
    tensor does.
    """

    offset: int
    rows: int
    row: int
    first: int
    last: int

    def of(self, state: StateTensor, start: int, stop: int) -> StateTensor:
        """This area of a state's tensor."""
        if state.read is None:
            return dataclasses.replace(
                state, tensor=self.view(state.tensor.detach()), start=start, stop=stop
            )
        # A tensor whose memory was given back has no views: all of it is read, when it is asked
        # for.
        stands_in = state.tensor.new_empty(()).expand(stop - start)
        return dataclasses.replace(
            state,
            tensor=stands_in,
            start=start,
            stop=stop,
            read=lambda _: self.view(state.values().detach()),
        )

    def view(self, tensor: Tensor) -> Tensor:
        """The area of a flat tensor, or of one of any shape that is flattened here."""
        flat = tensor.reshape(-1)
        if self.rows == 1:
            return flat[self.offset + self.first : self.offset + self.last]
        return flat[self.offset :][: self.rows * self.row].view(self.rows, self.row)[
            :, self.first : self.last
        ]


def shares(pieces: Iterable[StateTensor], mesh: Mesh) -> Iterator[StateTensor]:
    """The parts of `pieces` that this rank writes; ranks with identical pieces write equal parts of
    them.

    Small pieces, and those that are not contiguous (a part of them would need a copy of all), are
    written by one rank each, chosen by name.
    """
    places: dict[tuple[str, ...], tuple[int, int]] = {}
    for piece in pieces:
        if not piece.store:
            continue
        if piece.copies not in places:
            places[piece.copies] = mesh.size(*piece.copies), mesh.index(*piece.copies)
        size = piece.stop - piece.start
        (count, index) = places[piece.copies]
        if count == 1:
            yield piece
        elif size <= UNDIVIDED or not piece.tensor.is_contiguous():
            if zlib.crc32(piece.name.encode()) % count == index:
                yield piece
        else:
            low = size * index // count
            high = size * (index + 1) // count
            part = piece.tensor.detach().reshape(-1)[low:high]
            yield dataclasses.replace(
                piece, tensor=part, start=piece.start + low, stop=piece.start + high
            )
