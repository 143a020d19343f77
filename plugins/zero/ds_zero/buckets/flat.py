"""Flat buckets: parameters in one buffer, of which each rank owns an equal shard that its optimizer
updates.

[Note: pieces] The optimizer gets one tensor per parameter: this rank's piece of it, a view of the
shard, or empty. So an unused parameter keeps its weight and state (its piece has no gradient, and
torch's optimizers skip it), step counters are per parameter, and parameter groups have as many
entries as the user gave.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from ds_state_stores import is_evicted
from torch import Tensor, nn

from ds_core import comm
from ds_core.buckets import arrange
from ds_zero.buckets.layout import Layout
from ds_zero.buckets.records import Piece
from ds_zero.comm.hierarchy import far, sharding_axes
from ds_zero.init.sharded_param import pop_weight
from ds_zero.offload.away import AwayShard
from ds_zero.offload.placement import ON_DEVICE, StatePlacement

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.params import ParamInfo
    from ds_zero.buckets.records import DeferredMasters, OptimizerTensors
    from ds_zero.comm.hierarchy import SecondCopy
    from ds_zero.comm.wires import WeightWire

HOST_BYTES = 1 << 23
"""The most bytes of a bucket in host memory whose gradient buffer is freed in each step, or which
is reduced during backward. The allocator keeps freed memory only up to some size; above it every
step pays for fresh pages: 70 of 410 ms CPU time for 114 MB."""


class FlatBucket:
    """Parameters of one dtype, device and replica group, one after the other in a flat buffer.

    full: the buffer, of which parameters are views. shard: this rank's shard of it. sharded:
        whether weights are sharded between steps; else `full` is always there, and `shard` is a
        view of it. away: set where a store frees the shard's memory, which is there inside
        `shard_here` only. parts: of `shard`, by piece. master: what the optimizer
    updates: the shard itself, or a copy of it in the dtype of master weights or in a store.
        replicas, held, counted: see `ParamInfo`. axes: those of `replicas` over which it is
        sharded, far: the others; see `ds_zero.comm.hierarchy`.
    group, world, rank: along `axes`. reduces: whether other ranks have the parameters, too. owned:
        set where the optimizer updates full tensors (see `owned_tensors`); `master` is the shard
        then. second: this rank's share of a second copy of gathered weights, if there is one.
        deferred: who writes masters and `shard` at times of its own.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        infos: Sequence[ParamInfo],
        ctx: Context,
        sharded: bool,
        masters: bool = True,
        placement: StatePlacement = ON_DEVICE,
    ) -> None:
        mesh = ctx.mesh
        self.placement = placement
        self.params = list(params)
        self.names = [i.name for i in infos]
        self.shapes = [tuple(p.shape) for p in params]
        self.replicas = infos[0].replicas
        self.held = infos[0].held
        self.sharded = sharded
        self.axes, self.far = sharding_axes(mesh, self.replicas), far(mesh, self.replicas)
        self.reduces = mesh.size(*self.replicas) > 1
        text = f"{self.names[0]!r}" + (f" to {self.names[-1]!r}" if len(self.names) > 1 else "")
        # for comm.label
        self.about_weights = f"weights of {text}"
        self.about_gradients = f"gradients of {text}"
        self.counted = infos[0].counted
        self.group, self.world, self.rank = (
            mesh.group(*self.axes),
            mesh.size(*self.axes),
            mesh.index(*self.axes),
        )
        self.layout = Layout.of([p.numel() for p in params], self.world)
        self.full = self._flatten(mesh.ranks(*self.replicas), mesh.group(*self.replicas))
        mine = slice(self.rank * self.layout.shard_numel, (self.rank + 1) * self.layout.shard_numel)
        self.shard = self.full[mine]
        if sharded:
            self.shard = (
                self.shard.clone()
                if placement.shards is None
                else placement.shards.copy_in(self.shard)
            )
        self.shard_in_store = sharded and placement.shards is not None
        self.master_in_store = False
        self._staged: Tensor | None = None
        self.master = self._master(self.full[mine], ctx.precision.master) if masters else self.shard
        self.pieces = [self._piece(i) for i in range(len(self.params))]
        # torch makes no view of a tensor that is evicted
        self.parts = [self.shard[p.within] for p in self.pieces]
        self.owned: OptimizerTensors | None = None
        self.second: SecondCopy | None = None
        self.joined: dict[str, Tensor] = {}  # optimizer states by name, see `tiled_step`
        self.deferred: DeferredMasters | None = None
        if self.evictable:
            assert placement.masters is not None
            placement.masters.evict([self.master])
        frees = (
            self.shard_in_store and placement.shards is not None and not placement.shards.resident
        )
        self.away = (
            AwayShard(placement.shards, self.shard)
            if frees and placement.shards is not None
            else None
        )

    @torch.no_grad()
    def _master(self, mine: Tensor, wanted: torch.dtype | None) -> Tensor:
        """The tensor that the optimizer updates, made from this rank's shard of `full`."""
        dtype = wanted if wanted is not None and mine.is_floating_point() else mine.dtype
        store = self.placement.masters if self.trains else None
        shards = self.placement.shards
        stays = store is not None and store.resident and shards is not None and shards.resident
        stays = stays and not self.placement.deferred
        if store is not None and not (self.shard_in_store and stays and dtype == mine.dtype):
            self.master_in_store = True
            return store.copy_in(mine, dtype)
        if store is None and self.shard_in_store and self.trains:
            return mine.to(dtype, copy=True)
        return self.shard if dtype == mine.dtype else self.shard.to(dtype)

    @torch.no_grad()
    def _flatten(self, ranks: list[int], group: Any) -> Tensor:
        """Move the parameters into one buffer, and broadcast the weights of the first of the global
        `ranks`.
        """
        full = torch.zeros(
            self.layout.total, dtype=self.params[0].dtype, device=self.params[0].device
        )
        agreed = True
        for param, view in zip(self.params, self.views(full), strict=True):
            found = pop_weight(param, ranks)
            view.copy_(param if found is None else found[0])
            param.data = view
            agreed = agreed and found is not None and found[1]
        if len(ranks) > 1 and not agreed:
            comm.label(self.about_weights)
            comm.broadcast(full, src=ranks[0], group=group)
        return full

    def _piece(self, index: int) -> Piece:
        span = self.layout.span(index, self.rank)
        param = self.params[index]
        values = self.master[span.at : span.at + span.stop - span.start]
        master = nn.Parameter(values, requires_grad=param.requires_grad)
        return Piece(self.names[index], param, self.shapes[index], index, *span, master)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.full.dtype

    @property
    def trains(self) -> bool:
        """Whether its parameters have a dtype that can have gradients."""
        return self.full.is_floating_point() or self.full.is_complex()

    @property
    def stepped_on_host(self) -> bool:
        """Whether the optimizer updates this bucket on the host, so that reduced gradients are
        copied there.
        """
        placed = self.placement.masters is not None and not self.placement.deferred
        return placed and self.trains and self.owned is None

    @property
    def evictable(self) -> bool:
        """Whether masters and optimizer states are in a store that frees memory."""
        return (
            self.master_in_store
            and self.placement.masters is not None
            and not self.placement.masters.resident
        )

    @property
    def upcast(self) -> bool:
        """Whether masters have another dtype than the weights."""
        return self.master.dtype != self.dtype

    def shard_here(
        self, *, write: bool = False, fresh: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Inside, `shard` is in memory, and may be changed if `write`. fresh: all of it will be
        written.
        """
        return (
            contextlib.nullcontext()
            if self.away is None
            else self.away.here(write=write, fresh=fresh)
        )

    @contextlib.contextmanager
    def in_memory(self) -> Iterator[None]:
        """Inside, `master` is in memory and may be changed."""
        store = self.placement.masters
        if self.master is self.shard:
            with self.shard_here(write=True):
                yield
            return
        if store is None or not is_evicted(self.master):
            yield
            return
        store.fetch([self.master])
        store.wait([self.master])
        try:
            yield
        finally:
            store.evict([self.master])

    @property
    def trainable(self) -> bool:
        """Whether any parameter requires a gradient now."""
        return any(p.requires_grad for p in self.params)

    @property
    def optimized(self) -> list[Piece]:
        """One piece per parameter, whose `master` is what this rank's optimizer updates."""
        return self.pieces if self.owned is None else self.owned.pieces

    def view(self, flat: Tensor, index: int) -> Tensor:
        """Parameter `index` in a buffer with the layout of this bucket."""
        begin = self.layout.offsets[index]
        return flat[begin : begin + self.layout.sizes[index]].view(self.shapes[index])

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """All parameters in a buffer with this layout."""
        return (self.view(flat, i) for i in range(len(self.params)))

    def shards(self, flat: Tensor) -> Sequence[Tensor]:
        """The shards of all ranks in a buffer with this layout."""
        return flat.view(self.world, self.layout.shard_numel).unbind()

    def own_shard(self, flat: Tensor) -> Tensor:
        """This rank's shard of a buffer with this layout."""
        return flat.narrow(0, self.rank * self.layout.shard_numel, self.layout.shard_numel)

    @property
    def staged(self) -> Tensor | None:
        """Where a step writes this rank's shard: the shard itself, or host memory that is copied to
        the device.

        None where it cannot, or where masters have the weights' dtype: then `update_shard` copies
        them.
        """
        if not self.upcast or (self.away is not None and not self.evictable):
            return None
        if _together(self.shard, self.master):
            return self.shard
        if self._staged is None and self.placement.masters is not None:
            self._staged = self.placement.masters.buffer(self.layout.shard_numel, self.dtype)
        return self._staged

    def weight_targets(self) -> list[Tensor | None]:
        """For each of `optimized`, where a step writes its value in the weights' dtype; None:
        `update_shard` does.
        """
        if self.owned is not None:
            return self.owned.weight_targets()
        staged = self.staged
        if staged is None:
            return [None] * len(self.pieces)
        parts = self.parts if staged is self.shard else [staged[p.within] for p in self.pieces]
        return [
            part if p.stop > p.start else None for part, p in zip(parts, self.pieces, strict=True)
        ]

    @torch.no_grad()
    def update_shard(self, unused: Iterable[Piece]) -> None:
        """After a step, which has written `weight_targets`: write the remaining new weights into
        the shard.

        unused: those that the step has left as they were. Masters are in memory. See
        `Transfers.to_device`. Collective where the optimizer updates full tensors.
        """
        staged = self.staged
        if staged is not None and staged is not self.shard and self.owned is None:
            for piece in unused:
                staged[piece.within].copy_(piece.master)
        if self.owned is not None:
            with self.shard_here(write=True):
                self.owned.update_shard()
        elif staged is self.shard or self.master is self.shard:
            return
        elif self.master_in_store and not self.shard_in_store:
            assert self.placement.transfers is not None
            self.placement.transfers.to_device(
                self.shard, self.master if staged is None else staged
            )
        else:
            with self.shard_here(write=True, fresh=True):
                self.shard.copy_(self.master)

    @torch.no_grad()
    def write(self, index: int, weight: Tensor) -> None:
        """Make `weight`, equal on all ranks, the weight of parameter `index` in its shard and its
        master.

        The parameter itself must have it already, if it is unsharded.
        """
        flat = weight.reshape(-1)
        piece = self.pieces[index]
        owned = self.optimized[index]
        self.outdate()
        if self.sharded:
            with self.shard_here(write=True):
                self.parts[index].copy_(flat[piece.start : piece.stop])
        with self.in_memory():
            owned.master.data.view(-1).copy_(flat[owned.start : owned.stop])
        if self.deferred is not None:
            self.deferred.follow(owned)

    @torch.no_grad()
    def refresh_master(self, param: nn.Parameter) -> None:
        """Update the master of `param`, a replicated weight that was written, where they differ."""
        if self.sharded:
            return
        index = next(i for i, p in enumerate(self.params) if p is param)
        owned = self.optimized[index]
        with self.in_memory():
            master = owned.master.data.view(-1)
            now = (
                self.view(self.full, index).reshape(-1)[owned.start : owned.stop].to(master.device)
            )
            master.copy_(torch.where(master.to(now.dtype) == now, master, now))
        if self.deferred is not None:
            self.deferred.follow(owned)

    def outdate(self) -> None:
        """The weights have changed, on all ranks that have them: a second copy is not used any
        more.
        """
        if self.second is not None:
            self.second.valid = False

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the master weights from the shard.

        Collective where the optimizer updates full tensors.
        """
        if self.owned is not None:
            self.owned.refresh()
        elif self.master is not self.shard:
            with self.shard_here():
                self.master.copy_(self.shard)

    @torch.no_grad()
    def own(self) -> Tensor:
        """This rank's shard on the device; if a store has it, a copy in `full`."""
        if not self.shard_in_store:
            return self.shard
        assert self.placement.transfers is not None
        mine = self.own_shard(self.full)
        away = self.away
        if away is not None:
            away.hold()
        self.placement.transfers.to_device(
            mine, self.shard, then=None if away is None else away.drop
        )
        return mine

    def start_gather(self, wire: WeightWire) -> list[Any]:
        """Start to gather all shards into `full` by `wire`; returns the works to wait for."""
        if self.world == 1:
            self.own()
            return []
        comm.label(self.about_weights)
        return wire.start(self)


def _together(shard: Tensor, master: Tensor) -> bool:
    """Whether the step that updates the master can write the shard."""
    return shard.device == master.device


def needs_full_tensors(ctx: Context) -> bool:
    """Whether the optimizer must see full tensors: unless it is declared to be element-wise."""
    return ctx.grain != "element"


def make_buckets(
    params: Sequence[nn.Parameter],
    ctx: Context,
    capacity: Callable[[int], int],
    *,
    sharded: bool = False,
    masters: bool = True,
    placement: Callable[[nn.Parameter], StatePlacement] = lambda param: ON_DEVICE,
    small_on_host: bool = False,
) -> list[FlatBucket]:
    """Assign `params` to buckets in reverse order, which is about the order in which backward
    finishes them.

    capacity: world size -> the most elements of a bucket. masters: whether an optimizer will update
    them. Frozen parameters have buckets of their own, which are not reduced until they are thawed.
    placement: where each parameter's states are. small_on_host: buckets in host memory have at most
    `HOST_BYTES`.
    """
    masters = masters and not needs_full_tensors(ctx)

    def kind(param: nn.Parameter) -> tuple[Any, ...]:
        info = ctx.params[param]
        return (
            info.replicas,
            info.held,
            info.counted,
            param.dtype,
            param.device,
            param.requires_grad,
            placement(param),
        )

    def most(key: tuple[Any, ...]) -> int:
        replicas, _, _, dtype, device, *_ = key
        limit = capacity(ctx.mesh.size(*sharding_axes(ctx.mesh, replicas)))
        return (
            min(limit, HOST_BYTES // dtype.itemsize)
            if small_on_host and device.type == "cpu"
            else limit
        )

    runs = arrange(params, kind, lambda key, filled, size: filled + size > most(key))
    return [
        FlatBucket(run, [ctx.params[p] for p in run], ctx, sharded, masters, placement(run[0]))
        for run in runs
    ]
