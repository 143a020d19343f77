"""Where each tensor of an optimizer lies in its full parameter, and sums over full parameters.

An optimizer has one tensor per parameter. Under ZeRO it is a range of the flattened parameter,
under tensor or expert parallelism the parameter itself is a slice of a larger one. A `Layout` says
so for each tensor, whoever cut it; `Layout.sums` adds up what each rank has computed of its part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from ds_access.states import locate
from ds_run_state.slices import SLICES, Slice
from torch import Tensor

from ds_core import comm
from ds_core.comm import ALONE
from ds_core.errors import UsageError
from ds_core.partition import COUNTED_ELSEWHERE

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ds_core.context import Context
    from ds_core.partition import ParamInfo


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank has of a full tensor: the elements [start, stop) of a flattened slice of it."""

    slice: Slice
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def whole(self) -> bool:
        """Whether it is the full tensor."""
        return self.numel == math.prod(self.slice.shape)

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for ranks that have the same elements."""
        return (self.slice.ranges, self.start, self.stop)


@dataclass(frozen=True, eq=False)
class ParamPart:
    """One tensor of the optimizer, as a part of the full parameter.

    What follows from `ranks` is worked out once: each step asks for it, and ranks may be thousands.
    """

    name: str
    shape: tuple[int, ...]
    """Of the full parameter."""
    ranks: tuple[Held, ...]
    """What each rank of `Lane.group` has."""
    index: int
    """This rank's place in `ranks`."""
    tied: bool = False
    """Whether other groups of ranks update copies of it, which must stay equal bit for bit."""
    held: tuple[str, ...] = ()
    """Mesh axes along which ranks have other parameters, or other parts of it (tp, ep, pp)."""
    counted: bool = True
    """Whether sums over the model take this copy of a tied one."""
    copies: tuple[str, ...] = ()
    """Axes along which other lanes have this very parameter."""

    @property
    def mine(self) -> Held:
        """What this rank has."""
        return self.ranks[self.index]

    @cached_property
    def cut(self) -> bool:
        """Whether no rank has all of it."""
        return not any(held.whole for held in self.ranks)

    @cached_property
    def spread(self) -> bool:
        """Whether some rank lacks some of it."""
        return not all(held.whole for held in self.ranks)

    @cached_property
    def counts(self) -> bool:
        """Whether this rank is the first of those that have the same elements."""
        mine = self.mine
        return mine.numel > 0 and all(h.key != mine.key for h in self.ranks[: self.index])


@dataclass(slots=True, eq=False)
class Lane:
    """The parameters whose parts and replicas are on the ranks of one group."""

    axes: tuple[str, ...]
    group: ProcessGroup
    device: torch.device
    """Of collectives."""
    parts: dict[Tensor, ParamPart] = field(default_factory=dict)
    """By the optimizer's tensors, in one order on all ranks of the group."""


class Layout:
    """The tensors of an optimizer by `Lane`; all ranks of a lane's group have the same one."""

    def __init__(
        self,
        lanes: Iterable[Lane],
        others: Mapping[tuple[str, ...], tuple[ProcessGroup, torch.device]] | None = None,
    ) -> None:
        self.lanes = list(lanes)
        # By each `ParamPart.held` of any rank, in one order: the group along these axes, and the
        # device of its collectives.
        self._others = {} if others is None else dict(others)
        self.parts = {t: part for lane in self.lanes for t, part in lane.parts.items()}

    @classmethod
    def local(cls, tensors: Iterable[Tensor]) -> Layout:
        """Of one process: each tensor is a full parameter."""
        parts = {t: _whole(t) for t in tensors}
        device = next(iter(parts)).device if parts else torch.device("cpu")
        return cls([Lane((), ALONE, device, parts)])

    def sums(
        self,
        values: Mapping[Tensor, Tensor],
        length: Callable[[ParamPart], int] = lambda part: 1,
        of: Callable[[ParamPart], bool] = attrgetter("cut"),
    ) -> dict[Tensor, Tensor]:
        """Add up `values` over the ranks that have parts of a parameter. Collective.

        One all-reduce for each lane with a parameter that is cut; none where there is no such one.

        values: what this rank has computed of its part, a 1-d tensor of `length` values, in fp64. A
            tensor that is left out adds zeros: its part is empty, or has no gradient.
        of: which parameters take part, the same on all ranks: those that are cut.

        Returns the sums for all tensors of these, the same bits on all ranks of a group.
        """
        return self._reduce(values, length, of, torch.distributed.ReduceOp.SUM, 0.0)

    def maxima(
        self,
        values: Mapping[Tensor, Tensor],
        length: Callable[[ParamPart], int] = lambda part: 1,
        of: Callable[[ParamPart], bool] = attrgetter("cut"),
    ) -> dict[Tensor, Tensor]:
        """The largest of `values` over the ranks that have parts of a parameter; as `sums`. Collective.

        One that is left out on all ranks is -inf.
        """
        return self._reduce(values, length, of, torch.distributed.ReduceOp.MAX, -math.inf)

    def _reduce(
        self,
        values: Mapping[Tensor, Tensor],
        length: Callable[[ParamPart], int],
        of: Callable[[ParamPart], bool],
        op: torch.distributed.ReduceOp.RedOpType,
        nothing: float,
    ) -> dict[Tensor, Tensor]:
        found: dict[Tensor, Tensor] = {}
        for lane in self.lanes:
            cut = {t: part for t, part in lane.parts.items() if of(part)}
            if not cut:
                continue
            sizes = [length(part) for part in cut.values()]
            total = torch.full((sum(sizes),), nothing, dtype=torch.float64, device=lane.device)
            for (tensor, part), into in zip(cut.items(), total.split(sizes), strict=True):
                # Ranks with the same elements have the same value: it counts once.
                if tensor in values and part.counts:
                    into.copy_(values[tensor])
            comm.label("sums of optimizers")
            if op is torch.distributed.ReduceOp.SUM and any(part.tied for part in cut.values()):
                mine = total.clone()
                _add_in_order(total.zero_(), mine, lane.group)
            else:
                comm.all_reduce(total, op=op, group=lane.group)
            found.update(zip(cut, total.split(sizes), strict=True))
        return found

    def over_model(self, values: Mapping[Tensor, Tensor], length: int = 1) -> Tensor:
        """Add up `values` over the parameters of the model, those that other ranks have too. Collective.

        Once for each `ParamPart.held` that there is, along these axes only: where ranks of dp have
        other values, they have other sums.

        values: what this rank has computed of its part, a 1-d tensor of `length` values in fp64;
            every tensor with the same elements counts, but only one copy of a tied one.

        Returns the sums, the same bits on all ranks with the same values.
        """
        device = next((lane.device for lane in self.lanes), torch.device("cpu"))
        total = torch.zeros(length, dtype=torch.float64, device=device)
        by_axes: dict[tuple[str, ...], Tensor] = {}
        for tensor, value in values.items():
            part = self.parts[tensor]
            if part.counted:
                mine = by_axes.setdefault(part.held, torch.zeros_like(total))
                mine += value.to(device)
        for axes, (group, where) in (self._others or {(): (ALONE, device)}).items():
            mine = by_axes.get(axes, torch.zeros_like(total)).to(where)
            comm.label("sums of optimizers")
            _add_in_order(total, mine, group)
        return total

    def used(self, tensors: Iterable[Tensor]) -> set[Tensor]:
        """The parameters of which any rank of the group has one in `tensors`. Collective.

        Of experts one rank may have a gradient and another none.
        """
        having = set(tensors)
        one = torch.ones(1, dtype=torch.float64)
        sums = self.sums(dict.fromkeys(having, one), of=attrgetter("spread"))
        # One round trip to the device for all.
        flags = torch.cat(list(sums.values())).tolist() if sums else []
        return having | {t for t, flag in zip(sums, flags, strict=True) if flag}


def _add_in_order(total: Tensor, mine: Tensor, group: ProcessGroup) -> None:
    """Add `mine` of each rank of the group to `total`, in the order of ranks. Collective.

    So that other groups with the same values have the same bits: an all-reduce adds up in an order
    that depends on where a value stands, and what stands beside it differs between groups.
    """
    rows = mine.new_empty(comm.world_size(group), mine.numel())
    comm.all_gather_into_tensor(rows, mine, group=group)
    for row in rows.to(total.device):
        total += row


def _whole(tensor: Tensor) -> ParamPart:
    shape = tuple(tensor.shape)
    return ParamPart("", shape, (Held(Slice.of(shape), 0, tensor.numel()),), 0)


# -- the layout of an engine -----------------------------------------------------------------------


def bind(ctx: Context) -> None:
    """Give the engine's optimizer its layout, where it has a ``bind_layout``; for `ds_open`.

    Collective.
    """
    optimizer: Any = ctx.engine.optimizer
    if hasattr(optimizer, "bind_layout"):
        optimizer.bind_layout(layout_of(ctx))


def layout_of(ctx: Context) -> Layout:
    """Where the tensors of the engine's optimizer lie. Collective.

    Raises UsageError where it is not known how the parts of a parameter make up the whole.
    """
    engine = ctx.engine
    mesh = ctx.mesh
    slices = ctx.stash.get(SLICES) or {}
    _check_slices(ctx, slices)
    copies = ctx.stash.get(COUNTED_ELSEWHERE)
    tied = set(copies) if copies is not None else set()
    if ctx.world_size > 1:
        # The original is on another rank than its copy, which alone is noted.
        tied = {name for names in comm.all_gather_json(sorted(tied)) for name in names}
    # 1. What this rank has, by the axes along which there are other parts or replicas.
    mine: dict[tuple[str, ...], dict[str, tuple[Tensor, Held, torch.device]]] = {}
    infos = {ctx.params[param].name: ctx.params[param] for param in ctx.trained}
    for param in ctx.trained:
        info = ctx.params[param]
        shard = locate(engine, param)
        if shard is None:
            raise UsageError(
                f"{type(engine.optimizer).__name__} collects full tensors, and the partitioner "
                f"{type(engine.partitioner).__name__} does not say which elements of {info.name!r} "
                "each rank updates (ds_access.param_shard.LocatesParams)"
            )
        piece = slices.get(info.name)
        piece = Slice.of(shard.shape) if piece is None else piece
        held = Held(piece, *shard.updated_ranges[shard.index])
        axes = mesh.expand((*info.replicas, *piece.axes))
        mine.setdefault(axes, {})[info.name] = (shard.updated, held, shard.device)
    # 2. What the other ranks of each group have.
    lanes = []
    for axes, found in sorted(mine.items()):
        names = sorted(found)
        rows = [[found[n][1].slice.ranges, found[n][1].start, found[n][1].stop] for n in names]
        group = mesh.group(*axes)
        everyone = comm.all_gather_json(rows, group=group) if axes else [rows]
        lane = Lane(axes, group, next(iter(found.values()))[2])
        for place, name in enumerate(names):
            tensor, held, _ = found[name]
            ranks = tuple(_held(row[place], held.slice) for row in everyone)
            info = infos[name]
            distinct = mesh.expand((*info.held, *axes))
            copies = tuple(axis for axis in mesh.expand(mesh.names) if axis not in distinct)
            part = ParamPart(
                name,
                held.slice.shape,
                ranks,
                mesh.index(*axes),
                name in tied,
                mesh.expand(info.held),
                info.counted,
                copies,
            )
            _check_whole(part)
            lane.parts[tensor] = part
        lanes.append(lane)
    return Layout(lanes, _others(ctx, lanes))


def _others(
    ctx: Context, lanes: Iterable[Lane]
) -> dict[tuple[str, ...], tuple[ProcessGroup, torch.device]]:
    """The groups along the axes on which ranks have other parameters. All ranks agree on these."""
    lanes = list(lanes)
    along = {part.held for lane in lanes for part in lane.parts.values()}
    if ctx.world_size > 1:
        everyone = comm.all_gather_json(sorted(along))
        along = {tuple(axes) for rows in everyone for axes in rows}
    device = next((lane.device for lane in lanes), ctx.accelerator.current_device())
    return {axes: (ctx.mesh.group(*axes), device) for axes in sorted(along)}


def _held(row: Any, like: Slice) -> Held:
    """From what another rank has sent."""
    ranges = tuple(tuple((first, size) for first, size in dim) for dim in row[0])
    return Held(Slice(like.shape, ranges, like.axes), row[1], row[2])


def _check_whole(part: ParamPart) -> None:
    """The parts must make up the full parameter, each element once but for replicas."""
    parts = {held.key: held for held in part.ranks if held.numel}
    total = sum(held.numel for held in parts.values())
    if total != math.prod(part.shape):
        raise UsageError(
            f"the parts of parameter {part.name!r} have {total} elements, its full shape "
            f"{part.shape} {math.prod(part.shape)}: the optimizer cannot collect it"
        )


def _check_slices(ctx: Context, slices: Mapping[str, Slice]) -> None:
    """Raise UsageError, on all ranks, for a parameter of which others have parts that nobody has
    declared (`ds_run_state.slices.SLICES`). Collective."""
    if ctx.world_size == 1:
        return
    unknown = {
        info.name: axes
        for info in map(ctx.params.__getitem__, ctx.trained)
        if (axes := _undeclared(info, slices)) and info.counted
    }
    everyone = comm.all_gather_json(sorted(unknown))
    parts = [
        name
        for name, axes in unknown.items()
        if any(name in everyone[rank] for rank in ctx.mesh.ranks(*axes) if rank != ctx.rank)
    ]
    found = [name for names in comm.all_gather_json(parts[:1]) for name in names]
    if found:
        raise UsageError(
            f"the optimizer needs {found[0]!r} whole, each rank has a part of it, and nobody has "
            "declared which (ds_run_state.slices.SLICES); use an optimizer of single elements, "
            "such as AdamW"
        )


def _undeclared(info: ParamInfo, slices: Mapping[str, Slice]) -> Sequence[str]:
    """Axes along which ranks have different parameters of this name, and it is not known how."""
    piece = slices.get(info.name)
    return [axis for axis in info.held if piece is None or axis not in piece.axes]
