"""Stage 3: weights are partitioned too. A module's weights are gathered before it runs and released afterwards.

Small parameters stay whole and are served as in stage 2. Gradients travel on process groups of their own, so that
they need not keep step with gathers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_core import comm
from ds_core.errors import DSError
from ds_zero.base import ZeroPartitioner
from ds_zero.flat import FlatBucket, Piece, Share, make_buckets
from ds_zero.gather import Gathering, State, Unit
from ds_zero.grads import Reducer
from ds_zero.units import Gatherer, gatherers, members, persistent
from ds_zero.watch import Watch

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.context import Context
    from ds_zero.config import ZeroConfig

__all__ = ["Stage3"]

DESCRIBED = ("ds_id", "ds_shape", "ds_numel", "ds_tensor")
"""The documented attributes of a partitioned parameter."""


class Stage3(ZeroPartitioner):
    """Parameters live as parts; see the module's docstring."""

    def __init__(self, ctx: Context, section: ZeroConfig) -> None:
        super().__init__(ctx, section)
        self.units: list[Unit] = []
        self._gatherers: list[Gatherer] = []
        self._untrained: set[FlatBucket] = set()
        self._groups: dict[tuple[str, ...], Any] = {}
        self.gathering: Gathering
        self.watch: Watch

    def _lay_out(self, module: nn.Module, params: Sequence[nn.Parameter]) -> list[FlatBucket]:
        trained = set(params)
        leaves = self.offload.param is not None  # weights that are released rest elsewhere, so one rank has use for it
        shared_out = [p for p in module.parameters() if leaves or self.ctx.mesh.size(*self.ctx.params[p].replicas) > 1]
        small = persistent(shared_out, self.section)
        parted = {p for p in shared_out if p not in small}
        self._gatherers = gatherers(module, parted, self.section)
        home = self.offload.homes(params)
        stay = [p for p in params if p not in parted]
        whole = make_buckets(stay, self.ctx, self.section.bucket_elements, home=home)
        for gatherer, chosen, mine in members(self._gatherers, trained):
            for bucket in make_buckets(chosen, self.ctx, self._capacity, Share.PART, masters=mine, home=home):
                self._add_unit(bucket, gatherer.leaf, mine)
        return whole + [u.bucket for u in self.units]

    def _capacity(self, world: int) -> int:
        """The most elements of a unit: all of its module's, unless the config wants parameters one at a time."""
        return self.section.unit_elements(world)

    def _add_unit(self, bucket: FlatBucket, leaf: bool, trained: bool) -> None:
        unit = Unit(len(self.units), bucket, leaf)
        unit.release()
        self.units.append(unit)
        if not trained:
            self._untrained.add(bucket)

    def attach(self, module: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """See `Partitioner.attach`."""
        out = super().attach(module, groups)
        unit_of = {p: u for u in self.units for p in u.bucket.params}
        self.gathering = Gathering(self.section, self.units)
        self.watch = Watch(module, self._gatherers, self.gathering, unit_of, self._backward_began)
        self.reducer.after = self.watch.on_gradient
        for unit in self.units:
            for piece in unit.bucket.pieces:
                _describe(piece.param, unit, piece)
        return out

    def _make_reducer(self) -> Reducer:
        self._groups = _own_groups(self.ctx, {b.axes for b in self.buckets if b.world > 1})
        trained = [b for b in self.buckets if b.trains and b not in self._untrained]
        return Reducer(self.ctx, self.section, trained, lambda b: self._groups.get(b.axes), self._order)

    def _order(self) -> list[FlatBucket]:
        """Units whose forward was last come first; what stays whole comes last."""
        used = sorted(self.units, key=lambda u: -u.first_use)
        parted = [u.bucket for u in used if u.bucket not in self._untrained]
        whole = [b for b in self.buckets if b.share is Share.WHOLE and b.trains]
        return parted + whole

    # -- backward and step -----------------------------------------------------------------------------------

    def begin(self) -> None:
        """See `Partitioner.begin`."""
        self.gathering.in_backward = False
        super().begin()

    def _backward_began(self) -> None:
        """The first hook of a backward runs, in its outermost graph: whoever started it, it will be finished."""
        if self.reducer.reducing() and not self.reducer.running:
            self.reducer.start()
            self.finish_later()
        torch.autograd.Variable._execution_engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self.watch.end()
        self.gathering.end_pass()

    def step(self, optimizer: Optimizer) -> None:
        """See `Partitioner.step`; it may write weights, which no gather may be reading."""
        self.gathering.release_all()
        super().step(optimizer)

    @torch.no_grad()
    def publish(self) -> None:
        """See `Partitioner.publish`; only what is whole travels."""
        self.gathering.release_all()
        changed = [b for b in self.buckets if b not in self._untrained and self.reducer.used(b)]
        whole = [b for b in changed if b.share is Share.WHOLE]
        self._round(changed)
        self._spread(whole)
        if self.section.enable_sanity_checks:
            self._check_equal(whole)
            self._check_released()

    def _check_released(self) -> None:
        for unit in self.units:
            if unit.state is not State.RELEASED or unit.bucket.full.untyped_storage().nbytes():
                raise DSError(f"rank {self.ctx.rank}: {unit.bucket.names[0]!r} is still gathered after the step")

    def detach(self) -> None:
        """Make the module whole again, on every rank, and remove the hooks. Collective."""
        super().detach()
        if self._module is None:
            return
        self.watch.remove()
        for unit in self.units:
            if unit.state is State.RELEASED:
                unit.start(by_all_reduce=False)
            if unit.state is State.GATHERING:
                unit.complete()
            for param in unit.bucket.params:
                for name in DESCRIBED:
                    delattr(param, name)
        for group in self._groups.values():
            torch.distributed.destroy_process_group(group)
        self._groups.clear()


def _describe(param: Any, unit: Unit, piece: Piece) -> None:
    """Set the attributes that `DESCRIBED` names."""
    param.ds_id = unit.bucket.names[piece.index]
    param.ds_shape = torch.Size(piece.shape)
    param.ds_numel = param.ds_shape.numel()
    param.ds_tensor = unit.bucket.part[piece.within]


def _own_groups(ctx: Context, wanted: set[tuple[str, ...]]) -> dict[tuple[str, ...], Any]:
    """A second process group along each of the `wanted` sets of axes. Collective over all ranks."""
    if ctx.world_size == 1:
        return {}
    mine = {axes: sorted(ctx.mesh.ranks(*axes)) for axes in sorted(wanted)}
    rows = sorted({tuple(row) for rows in comm.all_gather_json(list(mine.values())) for row in rows})
    made = {row: torch.distributed.new_group(list(row)) for row in rows}
    return {axes: made[tuple(row)] for axes, row in mine.items()}
