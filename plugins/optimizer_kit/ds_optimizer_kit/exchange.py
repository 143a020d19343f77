"""Whole matrices, each on one rank: brought there from the parts that ranks have, and back.

[Note: one exchange each way] What a rank has of all matrices goes out in one all-to-all per `Lane`:
to each owner, what it lacks of its matrices, in their order. The owner puts them together from the
ranges that ZeRO cuts and the slices of tensor and expert parallelism. Afterwards one all-to-all
brings each rank its part of the result. Elements that several ranks have are sent by one of them,
and by nobody where the owner has them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from ds_run_state.slices import Slice
from torch import Tensor

from ds_core import comm
from ds_optimizer_kit.dealing import deal
from ds_optimizer_kit.layout import Held

if TYPE_CHECKING:
    from ds_core.comm import Work
    from ds_optimizer_kit.layout import Lane, Layout, ParamPart


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One matrix: a full parameter, or one of the matrices that are stacked in it."""

    tensor: Tensor
    """The optimizer's, of which this rank has a part."""
    part: ParamPart
    """Of the full parameter."""
    number: int
    """Which of the stacked matrices it is; 0 where none are stacked."""
    shape: tuple[int, ...]
    ranks: tuple[Held, ...]
    """What each rank of the lane's group has of it."""
    at: int
    """Where this rank's elements of it begin in the flattened `tensor`."""

    @property
    def name(self) -> str:
        """The parameter's."""
        return self.part.name

    @property
    def rows_columns(self) -> tuple[int, int]:
        """As a matrix: kernels of convolutions are (output channels, all the rest)."""
        return self.shape[0], math.prod(self.shape[1:])


@dataclass(frozen=True, slots=True)
class _Piece:
    """What one rank gives an owner of a unit, or gets of it."""

    rank: int
    unit: Unit
    held: Held


def group_alike(
    matrices: Iterable[tuple[Unit, Tensor]], key: Callable[[Unit], Hashable]
) -> list[list[tuple[Unit, Tensor]]]:
    """The matrices in lists that may be transformed in one batch: those of one `key`.

    A tied weight is by itself. Its copies are computed with other neighbours on other ranks, and
    products may be rounded otherwise in a batch of another size.
    """
    found: dict[Hashable, list[tuple[Unit, Tensor]]] = {}
    for unit, matrix in matrices:
        found.setdefault((key(unit), unit if unit.part.tied else None), []).append((unit, matrix))
    return list(found.values())


Cost = Callable[[int, int], float]
"""rows, columns -> what it takes to transform such a matrix, in any unit."""


def product_cost(rows: int, columns: int) -> float:
    """That of products of the matrix with itself."""
    return float(rows * columns * min(rows, columns))


class MatrixExchange:
    """The exchange of these matrices, whose owners are chosen once. All ranks make it alike.

    tensors: tensor of the optimizer -> how many of its first dimensions number matrices that are
        stacked in it (1 for a stack of experts).
    cost: by which matrices are dealt.
    """

    def __init__(
        self, layout: Layout, tensors: Mapping[Tensor, int], cost: Cost = product_cost
    ) -> None:
        self._lanes = [
            _LaneExchange(lane, _lane_units(lane, tensors), cost) for lane in layout.lanes
        ]

    def owned(self) -> Iterator[Unit]:
        """The matrices that this rank transforms whenever they are exchanged."""
        return (unit for lane in self._lanes for unit in lane.owned())

    def owners_of(self, tensor: Tensor) -> tuple[Lane, dict[Unit, int]] | None:
        """The matrices in `tensor`, each with its owner's place in the group of their lane.

        None where the full parameter has no elements, and so no matrices.
        """
        for lane in self._lanes:
            found = {unit: owner for unit, owner in lane.owners.items() if unit.tensor is tensor}
            if found:
                return lane.lane, found
        return None

    def start(self, values: Mapping[Tensor, Tensor], used: Collection[Tensor]) -> None:
        """Send `values` to the owners; others may be worked on until `finish`. Collective.

        values: for each tensor of `used`, unless it is empty, this rank's elements, flat.
        used: the tensors whose matrices are exchanged, the same on all ranks of a group.
        """
        used = set(used)
        for lane in self._lanes:
            lane.start(values, used)

    def finish(self) -> list[list[tuple[Unit, Tensor]]]:
        """The matrices that this rank owns, in their full shapes, by lane.

        Matrices of one lane are the same on the ranks of all groups that have copies of them, so
        that what is computed of a lane's by themselves is equal bit for bit.
        """
        return [lane.finish() for lane in self._lanes]

    def give_back(self, results: Mapping[Unit, Tensor]) -> dict[Tensor, Tensor]:
        """Send what came of each unit that `finish` gave, in its full shape. Collective.

        Returns, for each tensor that was used, this rank's elements, flat.
        """
        found: dict[Tensor, Tensor] = {}
        for lane in self._lanes:
            lane.start_back(results)
        for lane in self._lanes:
            found.update(lane.finish_back())
        return found


def _lane_units(lane: Lane, tensors: Mapping[Tensor, int]) -> list[Unit]:
    return [
        unit
        for tensor, part in lane.parts.items()
        if tensor in tensors
        for unit in _units(tensor, part, tensors[tensor])
        if math.prod(unit.shape)
    ]


def _units(tensor: Tensor, part: ParamPart, stacked: int) -> Iterator[Unit]:
    """The matrices in a parameter whose first `stacked` dimensions number them."""
    if not stacked:
        yield Unit(tensor, part, 0, part.shape, part.ranks, 0)
        return
    for number, index in enumerate(itertools.product(*map(range, part.shape[:stacked]))):
        found = [_of_stack(held, index) for held in part.ranks]
        ranks = tuple(held for held, _ in found)
        at = found[part.index][1]
        yield Unit(tensor, part, number, part.shape[stacked:], ranks, at)


def _of_stack(held: Held, number: Sequence[int]) -> tuple[Held, int]:
    """What a rank has of one matrix of a stack, and where this begins in what it has of all."""
    count = len(number)
    inner = Slice(held.slice.shape[count:], held.slice.ranges[count:], held.slice.axes)
    size = math.prod(inner.size)
    place = 0
    for index, ranges in zip(number, held.slice.ranges[:count], strict=True):
        local = _local(index, ranges)
        if local is None:
            return Held(inner, 0, 0), 0
        place = place * sum(n for _, n in ranges) + local
    # The rank's range of the flattened stack, as a range of this matrix.
    start = min(max(held.start - place * size, 0), size)
    stop = max(min(held.stop - place * size, size), start)
    return Held(inner, start, stop), place * size + start - held.start


def _local(index: int, ranges: Iterable[tuple[int, int]]) -> int | None:
    """The place of `index` among those of `ranges`, one after the other."""
    before = 0
    for first, size in ranges:
        if first <= index < first + size:
            return before + index - first
        before += size
    return None


class _LaneExchange:
    """The exchange of one lane."""

    def __init__(self, lane: Lane, units: list[Unit], cost: Cost) -> None:
        self.lane = lane
        self.units = units
        self._size = comm.world_size(lane.group) if lane.axes else 1
        self._rank = next(iter(lane.parts.values())).index if lane.parts else 0
        wide = any(u.tensor.dtype == torch.float64 for u in units)
        # Sums of many products: 16-bit tensors are exchanged in fp32.
        self._dtype = torch.float64 if wide else torch.float32
        owners = deal(
            [cost(*unit.rows_columns) for unit in units],
            [[r for r, held in enumerate(unit.ranks) if held.whole] for unit in units],
            self._size,
        )
        self.owners = dict(zip(units, owners, strict=True))
        # Unit -> who gives its owner which elements.
        self._sources = {unit: list(_sources(unit, owner)) for unit, owner in self.owners.items()}
        # -- of the running exchange --
        self._live: list[Unit] = []
        self._received = torch.empty(0)
        self._pieces: list[_Piece] = []
        self._work: Work | None = None
        # What the owner has itself.
        self._values: Mapping[Tensor, Tensor] = {}

    def owned(self) -> Iterator[Unit]:
        """See `MatrixExchange.owned`."""
        return (unit for unit, owner in self.owners.items() if owner == self._rank)

    def start(self, values: Mapping[Tensor, Tensor], used: Collection[Tensor]) -> None:
        """See `MatrixExchange.start`."""
        self._live = [unit for unit in self.units if unit.tensor in used]
        self._values = values
        sent = [
            _Piece(self.owners[unit], unit, piece.held)
            for unit in self._live
            for piece in self._sources[unit]
            if piece.rank == self._rank != self.owners[unit]
        ]
        # A piece that arrives: from its source, in the order of units.
        arriving = [
            piece
            for unit in self._live
            if self.owners[unit] == self._rank
            for piece in self._sources[unit]
            if piece.rank != self._rank
        ]
        parts = [(p, self._own(p.unit, p.held)) for p in sent]
        self._send(parts, arriving)

    def finish(self) -> list[tuple[Unit, Tensor]]:
        """See `MatrixExchange.finish`."""
        arrived: dict[Unit, list[tuple[Held, Tensor]]] = {}
        for piece, values in self._receive():
            arrived.setdefault(piece.unit, []).append((piece.held, values))
        found = []
        for unit in self._live:
            if self.owners[unit] != self._rank:
                continue
            mine = [p.held for p in self._sources[unit] if p.rank == self._rank]
            parts = [*arrived.get(unit, []), *((h, self._own(unit, h)) for h in mine)]
            found.append((unit, _join(unit.shape, parts)))
        self._values = {}
        return found

    def start_back(self, results: Mapping[Unit, Tensor]) -> None:
        """See `MatrixExchange.give_back`."""
        sent = []
        self._back: list[tuple[Unit, Tensor]] = []
        arriving = []
        for unit in self._live:
            owner = self.owners[unit]
            if owner != self._rank:
                held = unit.ranks[self._rank]
                if held.numel:
                    arriving.append(_Piece(owner, unit, held))
                continue
            taken: dict[object, Tensor] = {}
            for rank, held in enumerate(unit.ranks):
                if not held.numel:
                    continue
                key = held.slice.ranges
                if key not in taken:
                    taken[key] = held.slice.take(results[unit]).reshape(-1)
                values = taken[key][held.start : held.stop]
                if rank == self._rank:
                    self._back.append((unit, values))
                else:
                    sent.append((_Piece(rank, unit, held), values))
        self._send(sent, arriving)

    def finish_back(self) -> dict[Tensor, Tensor]:
        """See `MatrixExchange.give_back`."""
        found: dict[Tensor, list[tuple[int, Tensor]]] = {}
        for unit, values in [*self._back, *((p.unit, v) for p, v in self._receive())]:
            found.setdefault(unit.tensor, []).append((unit.at, values))
        self._live = []
        self._back = []
        # The matrices of a stack one after the other, as they lie in the tensor.
        return {
            tensor: parts[0][1]
            if len(parts) == 1
            else torch.cat([values for _, values in sorted(parts, key=lambda part: part[0])])
            for tensor, parts in found.items()
        }

    def _own(self, unit: Unit, held: Held) -> Tensor:
        """This rank's elements of a matrix."""
        values = self._values[unit.tensor].reshape(-1)[unit.at : unit.at + held.numel]
        return values.to(self.lane.device, self._dtype)

    def _send(self, sent: Sequence[tuple[_Piece, Tensor]], arriving: Sequence[_Piece]) -> None:
        """Start the all-to-all; pieces for (from) one rank are in the order of units."""
        self._work = None
        self._pieces = sorted(arriving, key=lambda piece: piece.rank)
        if self._size == 1:
            return
        gives = [0] * self._size
        takes = [0] * self._size
        for piece, values in sent:
            gives[piece.rank] += values.numel()
        for piece in arriving:
            takes[piece.rank] += piece.held.numel
        empty = torch.empty(0, dtype=self._dtype, device=self.lane.device)
        ordered = sorted(sent, key=lambda part: part[0].rank)
        source = torch.cat([empty, *(values.to(empty) for _, values in ordered)])
        self._received = empty.new_empty(sum(takes))
        comm.label("matrices of optimizers")
        self._work = comm.all_to_all_single(
            self._received, source, takes, gives, group=self.lane.group, async_op=True
        )

    def _receive(self) -> list[tuple[_Piece, Tensor]]:
        if self._work is None:
            return []
        self._work.wait()
        parts = self._received.split([piece.held.numel for piece in self._pieces])
        found = list(zip(self._pieces, parts, strict=True)) if self._pieces else []
        self._work = None
        self._received = torch.empty(0)
        return found


def _sources(unit: Unit, owner: int) -> Iterator[_Piece]:
    """Who gives the owner which elements: each once, and its own if it has them."""
    ranks: dict[object, list[int]] = {}
    for rank, held in enumerate(unit.ranks):
        if held.numel:
            ranks.setdefault(held.key, []).append(rank)
    for same in ranks.values():
        # Among copies each owner asks another one, so that all have about as much to send.
        source = owner if owner in same else same[owner % len(same)]
        yield _Piece(source, unit, unit.ranks[source])


def _join(shape: tuple[int, ...], parts: Sequence[tuple[Held, Tensor]]) -> Tensor:
    """The full tensor, from flat parts that make it up."""
    (held, values), *others = parts
    if not others:  # all of it
        return values.view(shape)
    # 1. The ranges that ZeRO has cut make up slices, one for each rank along tp and ep.
    slices: dict[object, list[tuple[Held, Tensor]]] = {}
    for held, values in parts:
        slices.setdefault(held.slice.ranges, []).append((held, values))
    full = values.new_empty(shape)
    for members in slices.values():
        members.sort(key=lambda part: part[0].start)
        piece = members[0][0].slice
        local = torch.cat([values for _, values in members]).view(piece.size)
        # 2. The boxes of a slice lie anywhere in the full tensor.
        for part in piece.parts():
            into = full[part.box.slices()]
            index = tuple(
                slice(at, at + size) for at, size in zip(part.at, part.box.size, strict=True)
            )
            into.copy_(local[index])
    return full
