"""Full tensors for optimizers that need them (LAMB's norms, Muon's matrices), in every stage.

Parameters, gradients and reductions stay sharded by elements. Only the optimizer's tensors differ:
each parameter has one owner among its replicas, which has its master weight and states unsharded in
the parameter's shape, and its gradient at the step. The other ranks have an empty tensor, so
parameter groups have as many entries as the user gave.

[Note: owners] A parameter that is within one rank's shard is owned by that rank, and never moves.
Those that cross the border of a shard go to the rank with the least so far, largest first. So no
rank has more than an equal share and one tensor, and only crossing tensors are sent: per bucket,
their gradients to the owners before the step and their weights back after it, one all-to-all each.

[Note: order] Shards are consecutive ranges of a bucket, so what ranks 0, 1, 2... send of my tensors
arrives as my tensors one after the other: full gradients are views of the received buffer, without
a further copy.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_zero.buckets.flat import FlatBucket
from ds_zero.buckets.records import Piece

if TYPE_CHECKING:
    from ds_core.context import Context


def choose_owners(sizes: Sequence[int], holders: Sequence[int | None], world: int) -> list[int]:
    """The owner of each tensor; no rank gets more than ``sum(sizes) / world + max(sizes)``. See
    [Note: owners].

    holders: the rank whose shard contains a tensor; None for one that crosses a border (or is
    empty).
    """
    room = sum(sizes) / world + max(sizes, default=0)
    owners = [-1] * len(sizes)
    loads = [0] * world
    for index, (size, holder) in enumerate(zip(sizes, holders, strict=True)):
        # Padding makes the first ranks' shards fuller; over very many tiny buckets that could add
        # up.
        if holder is not None and loads[holder] + size <= room:
            owners[index] = holder
            loads[holder] += size
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for index in sorted((i for i, o in enumerate(owners) if o < 0), key=lambda i: -sizes[i]):
        load, owners[index] = heap[0]
        heapq.heapreplace(heap, (load + sizes[index], owners[index]))
    return owners


def assign_owners(ctx: Context, buckets: Sequence[FlatBucket]) -> None:
    """Choose owners for all parameters of `buckets` and create their masters.

    Collective over the replicas.
    """
    by_axes: dict[tuple[str, ...], list[FlatBucket]] = {}
    for bucket in buckets:
        by_axes.setdefault(bucket.axes, []).append(bucket)
    for members in by_axes.values():
        places = [(b, i) for b in members for i in range(len(b.params))]
        sizes = [b.layout.sizes[i] * _master_dtype(ctx, b).itemsize for b, i in places]
        owners = choose_owners(sizes, [_holder(b, i) for b, i in places], members[0].world)
        for bucket in members:
            mine = owners[: len(bucket.params)]
            owners = owners[len(bucket.params) :]
            bucket.owned = OwnedTensors(bucket, mine, _master_dtype(ctx, bucket))


def _holder(bucket: FlatBucket, index: int) -> int | None:
    """The rank whose shard contains all of a parameter, if there is one."""
    ranks = bucket.layout.ranks(index)
    return ranks[0] if len(ranks) == 1 else None


def _master_dtype(ctx: Context, bucket: FlatBucket) -> torch.dtype:
    wanted = ctx.precision.master
    return wanted if wanted is not None and bucket.full.is_floating_point() else bucket.dtype


class OwnedTensors:
    """One bucket's parameters as the optimizer gets them.

    pieces: per parameter, [0, numel) with the full master if this rank owns it, else [0, 0) with an
    empty one. owners: per parameter, the rank in the bucket's group.
    """

    def __init__(self, bucket: FlatBucket, owners: Sequence[int], dtype: torch.dtype) -> None:
        self.bucket = bucket
        self.owners = list(owners)
        layout = bucket.layout
        rank = bucket.rank
        moving = [
            i for i, owner in enumerate(owners) if layout.sizes[i] and owner != _holder(bucket, i)
        ]
        self._moves = bool(moving)  # equal on all ranks
        self._arriving = [i for i in moving if owners[i] == rank]
        leaving = [(owners[i], i) for i in moving if rank in layout.ranks(i)]
        self._leaving = [layout.span(i, rank) for _, i in sorted(leaving)]
        self._send_counts = [0] * bucket.world
        self._receive_counts = [0] * bucket.world
        for (owner, _), span in zip(sorted(leaving), self._leaving, strict=True):
            self._send_counts[owner] += span.stop - span.start
        for index in self._arriving:
            for source in layout.ranks(index):
                span = layout.span(index, source)
                self._receive_counts[source] += span.stop - span.start
        # of weights and exchanges; masters or shards may be on the host
        self._device = bucket.full.device
        self._views = self._aliases(dtype)
        self.pieces = [self._piece(i, dtype) for i in range(len(bucket.params))]
        self.refresh()

    def _aliases(self, dtype: torch.dtype) -> dict[int, Tensor]:
        """Masters that need no memory of their own, because the full weight is on this rank in
        their dtype.
        """
        if (
            dtype != self.bucket.dtype
            or self.bucket.placement.masters is not None
            or self.bucket.shard_in_store
        ):
            return {}
        owned = [i for i, owner in enumerate(self.owners) if owner == self.bucket.rank]
        if not self.bucket.sharded:
            return {i: self.bucket.view(self.bucket.full, i) for i in owned}
        return {i: self._in_shard(self.bucket.shard, i) for i in owned if i not in self._arriving}

    def _in_shard(self, shard: Tensor, index: int) -> Tensor:
        """Parameter `index`, which is in this rank's shard, in its shape."""
        return shard[self.bucket.pieces[index].within].view(self.bucket.shapes[index])

    def _piece(self, index: int, dtype: torch.dtype) -> Piece:
        bucket = self.bucket
        param = bucket.params[index]
        shape = bucket.shapes[index]
        if self.owners[index] == bucket.rank:
            values = self._views.get(index)
            if values is None and bucket.placement.masters is not None:
                values = bucket.placement.masters.buffer(bucket.layout.sizes[index], dtype).view(
                    shape
                )
            elif values is None:
                values = torch.empty(shape, dtype=dtype, device=self._device)
        else:  # with as many dimensions, since some optimizers look
            device = self._device if bucket.placement.masters is None else torch.device("cpu")
            values = torch.empty((0, *shape[1:]), dtype=dtype, device=device)
        count = bucket.layout.sizes[index] if self.owners[index] == bucket.rank else 0
        master = nn.Parameter(values, requires_grad=param.requires_grad)
        return Piece(bucket.names[index], param, shape, index, 0, count, 0, master)

    @property
    def _owned(self) -> list[Piece]:
        return [p for p in self.pieces if p.stop > p.start]

    # -- exchanges ---------------------------------------------------------------------------------

    def _collect(self, shard: Tensor) -> dict[int, Tensor]:
        """The tensors that this rank owns and does not have in its shard, flat, from the shards of
        all ranks.
        """
        if not self._moves:
            return {}
        source = torch.cat(
            [shard[:0], *(shard[s.at : s.at + s.stop - s.start] for s in self._leaving)]
        )
        source = source.to(self._device)
        out = source.new_empty(sum(self._receive_counts))
        comm.all_to_all_single(
            out, source, self._receive_counts, self._send_counts, group=self.bucket.group
        )
        sizes = [self.bucket.layout.sizes[i] for i in self._arriving]
        return dict(zip(self._arriving, out.split(sizes), strict=True))

    def _local(self, index: int) -> bool:
        """Whether the weight of an owned parameter is in this rank's shard, separate from its
        master.
        """
        return index not in self._views and index not in self._arriving

    def weight_targets(self) -> list[Tensor | None]:
        """See `FlatBucket.weight_targets`."""
        shard = self.bucket.shard
        if self.bucket.away is not None:
            return [None] * len(self.pieces)
        here = [
            p.stop > p.start and self._local(p.index) and p.master.device == shard.device
            for p in self.pieces
        ]
        here = [h and p.master.dtype != shard.dtype for h, p in zip(here, self.pieces, strict=True)]
        return [
            self._in_shard(shard, p.index) if h else None
            for h, p in zip(here, self.pieces, strict=True)
        ]

    @torch.no_grad()
    def update_shard(self) -> None:
        """Write the owners' masters into the shards of all ranks, except for `weight_targets`.

        Collective.
        """
        shard = self.bucket.shard
        for piece, copy in zip(self.pieces, self.weight_targets(), strict=True):
            if piece.stop > piece.start and copy is None and self._local(piece.index):
                self._in_shard(shard, piece.index).copy_(piece.master)
        if not self._moves:
            return
        mine = [self.pieces[i].master.reshape(-1).to(shard.dtype) for i in self._arriving]
        source = torch.cat(mine or [shard[:0]]).to(self._device)
        out = source.new_empty(sum(self._send_counts))
        comm.all_to_all_single(
            out, source, self._send_counts, self._receive_counts, group=self.bucket.group
        )
        for span, values in zip(
            self._leaving, out.split([s.stop - s.start for s in self._leaving]), strict=True
        ):
            shard[span.at : span.at + values.numel()].copy_(values)

    @torch.no_grad()
    def refresh(self) -> None:
        """Make masters from the weights. Collective if weights are sharded."""
        with self.bucket.shard_here():
            self._refresh()

    def _refresh(self) -> None:
        bucket = self.bucket
        replicated = not bucket.sharded
        found = {} if replicated else self._collect(bucket.shard)
        for piece in self._owned:
            if piece.index in self._views:
                continue
            if replicated:
                weight = bucket.view(bucket.full, piece.index)
            elif piece.index in found:
                weight = found[piece.index].view(piece.shape)
            else:
                weight = self._in_shard(bucket.shard, piece.index)
            piece.master.copy_(weight)

    @torch.no_grad()
    def gradients(self, shard: Tensor, used: Sequence[bool]) -> list[Tensor | None]:
        """The full gradient of each piece, on its master's device, from each rank's reduced shard.
        Collective.

        used: per parameter, whether any rank had a gradient for it; without one, the master gets
        None.
        """
        found = self._collect(shard)
        grads: list[Tensor | None] = []
        for piece in self.pieces:
            grad = None
            if piece.stop > piece.start and used[piece.index]:
                flat = found.get(piece.index)
                grad = (
                    self._in_shard(shard, piece.index) if flat is None else flat.view(piece.shape)
                )
                grad = grad.to(piece.master.device)
            grads.append(grad)
        return grads
