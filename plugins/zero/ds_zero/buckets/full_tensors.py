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
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_zero.buckets.flat import FlatBucket
from ds_zero.buckets.masters import Masters
from ds_zero.buckets.records import Fragment
from ds_zero.buckets.sizes import choose_dtype
from ds_zero.reduce.bucket_grads import Grads

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_zero.reduce.bucket_grads import GradRules


def choose_owners(sizes: Sequence[int], holders: Sequence[int | None], world: int) -> list[int]:
    """The owner of each tensor; no rank gets more than ``sum(sizes) / world + max(sizes)``.

    See [Note: owners].

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
    wanted = ctx.precision.master
    by_axes: dict[tuple[str, ...], list[FlatBucket]] = {}
    for bucket in buckets:
        by_axes.setdefault(bucket.axes, []).append(bucket)
    for members in by_axes.values():
        places = [(b, i) for b in members for i in range(len(b.params))]
        sizes = [b.layout.sizes[i] * choose_dtype(b.dtype, wanted).itemsize for b, i in places]
        owners = choose_owners(sizes, [_holder(b, i) for b, i in places], members[0].world)
        for bucket in members:
            mine = owners[: len(bucket.params)]
            owners = owners[len(bucket.params) :]
            bucket.masters = FullTensors(bucket, mine, choose_dtype(bucket.dtype, wanted))
            bucket.masters.refresh()


def _holder(bucket: FlatBucket, index: int) -> int | None:
    """The rank whose shard contains all of a parameter, if there is one."""
    ranks = bucket.layout.ranks(index)
    return ranks[0] if len(ranks) == 1 else None


class FullTensors(Masters):
    """One bucket's parameters as full tensors, each on the rank that owns it.

    A fragment is [0, numel) with the full master if this rank owns the parameter, else [0, 0) with
    an empty one. `refresh` fills them.

    owners: per parameter, the rank in the bucket's group that owns it.
    """

    copied = True
    full_tensors = True

    def __init__(self, bucket: FlatBucket, owners: Sequence[int], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.owners = list(owners)
        layout = bucket.layout
        rank = bucket.rank

        # -- what is exchanged: see [Note: order] --
        # Parameters that are not in their owner's shard, or not in full.
        moving = [
            i for i, owner in enumerate(owners) if layout.sizes[i] and owner != _holder(bucket, i)
        ]
        self._moves = bool(moving)  # equal on all ranks
        self._arriving = [i for i in moving if owners[i] == rank]
        # What this rank has of others' parameters, in the order of their owners.
        leaving = [(owners[i], i) for i in moving if rank in layout.ranks(i)]
        self._leaving = [layout.span(i, rank) for _, i in sorted(leaving)]
        self._send_counts = [0] * bucket.world
        self._receive_counts = [0] * bucket.world
        for (owner, _), span in zip(sorted(leaving), self._leaving, strict=True):
            self._send_counts[owner] += span.numel
        for index in self._arriving:
            for source in layout.ranks(index):
                span = layout.span(index, source)
                self._receive_counts[source] += span.numel

        # -- memory --
        # Of weights and exchanges; masters or shards may be on the host.
        self._device = bucket.full.device
        self.bucket = bucket
        # Masters that are the weight itself, by index.
        self._views = self._aliases(bucket)
        super().__init__(bucket, bucket.weights.shard, bucket.masters.store)

    @property
    def dtype(self) -> torch.dtype:
        """See `Masters.dtype`."""
        return self._dtype

    def _aliases(self, bucket: FlatBucket) -> dict[int, Tensor]:
        """Masters that need no memory of their own, because the full weight is on this rank in
        their dtype.
        """
        offloaded = bucket.masters.store is not None or bucket.weights.on_host is not None
        if offloaded or self.dtype != bucket.dtype:
            return {}
        owned = [i for i, owner in enumerate(self.owners) if owner == bucket.rank]
        if not bucket.weights.sharded:
            return {i: bucket.view(bucket.full, i) for i in owned}
        shard = bucket.weights.shard
        return {i: self._in_shard(shard, i) for i in owned if i not in self._arriving}

    def _in_shard(self, shard: Tensor, index: int) -> Tensor:
        """Parameter `index`, which is in this rank's shard, in its shape."""
        return shard[self.bucket.fragments[index].within].view(self.bucket.shapes[index])

    def _fragment(self, index: int) -> Fragment:
        bucket = self.bucket
        param = bucket.params[index]
        shape = bucket.shapes[index]
        mine = self.owners[index] == bucket.rank
        values = self._views.get(index)
        if values is None:
            # With as many dimensions where it is empty, since some optimizers look.
            values = self._new(shape if mine else (0, *shape[1:]))
        count = bucket.layout.sizes[index] if mine else 0
        master = nn.Parameter(values, requires_grad=param.requires_grad)
        return Fragment(bucket.names[index], param, shape, index, 0, count, 0, master)

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        """Memory for a master, with any values."""
        if self.store is None:
            return torch.empty(shape, dtype=self.dtype, device=self._device)
        if not math.prod(shape):
            return torch.empty(shape, dtype=self.dtype)
        return self.store.buffer(math.prod(shape), self.dtype).view(shape)

    @property
    def _owned(self) -> list[Fragment]:
        return [p for p in self.fragments if p.numel]

    # -- exchanges ---------------------------------------------------------------------------------

    def _collect(self, shard: Tensor) -> dict[int, Tensor]:
        """The tensors that this rank owns and does not have in its shard, flat, from the shards of
        all ranks.
        """
        if not self._moves:
            return {}
        source = torch.cat([shard[:0], *(shard[s.within] for s in self._leaving)]).to(self._device)
        out = source.new_empty(sum(self._receive_counts))
        comm.all_to_all_single(
            out, source, self._receive_counts, self._send_counts, group=self.bucket.group
        )
        sizes = [self.bucket.layout.sizes[i] for i in self._arriving]
        return dict(zip(self._arriving, out.split(sizes), strict=True))

    def _whole(self, fragment: Fragment, shard: Tensor, found: Mapping[int, Tensor]) -> Tensor:
        """An owned tensor in its shape, from what `_collect` has found, or from this shard."""
        flat = found.get(fragment.index)
        if flat is None:
            return self._in_shard(shard, fragment.index)
        return flat.view(fragment.shape)

    def _local(self, index: int) -> bool:
        """Whether the weight of an owned parameter is in this rank's shard, separate from its
        master.
        """
        return index not in self._views and index not in self._arriving

    def targets(self) -> list[Tensor | None]:
        """See `Masters.targets`."""
        return [self._target(p) for p in self.fragments]

    def _target(self, fragment: Fragment) -> Tensor | None:
        """Where a step can write the new weight: in this shard, on the master's device, cast."""
        weights = self.bucket.weights
        master = fragment.master
        writes = fragment.numel and self._local(fragment.index) and self.dtype != self.bucket.dtype
        # The step does not read an evicted shard into memory.
        if not writes or weights.evicts is not None or master.device != weights.shard.device:
            return None
        return self._in_shard(weights.shard, fragment.index)

    @torch.no_grad()
    def write_back(self, unused: Iterable[Fragment]) -> None:
        """See `Masters.write_back`: from the owners into the shards of all ranks. Collective."""
        shard = self.bucket.weights.shard
        with self.bucket.weights.in_memory(write=True):
            for fragment, copy in zip(self.fragments, self.targets(), strict=True):
                if fragment.numel and copy is None and self._local(fragment.index):
                    self._in_shard(shard, fragment.index).copy_(fragment.master)
            # The exchange of `_collect` in reverse: send and receive counts are swapped.
            if not self._moves:
                return
            mine = [self.fragments[i].master.reshape(-1).to(shard.dtype) for i in self._arriving]
            source = torch.cat(mine or [shard[:0]]).to(self._device)
            out = source.new_empty(sum(self._send_counts))
            comm.all_to_all_single(
                out, source, self._send_counts, self._receive_counts, group=self.bucket.group
            )
            sizes = [span.numel for span in self._leaving]
            for span, values in zip(self._leaving, out.split(sizes), strict=True):
                shard[span.within].copy_(values)

    @torch.no_grad()
    def refresh(self) -> None:
        """See `Masters.refresh`. Collective if weights are sharded."""
        weights = self.bucket.weights
        with weights.in_memory():
            found = self._collect(weights.shard) if weights.sharded else {}
            for fragment in self._owned:
                if fragment.index in self._views:
                    continue
                if weights.sharded:
                    weight = self._whole(fragment, weights.shard, found)
                else:
                    weight = self.bucket.view(self.bucket.full, fragment.index)
                fragment.master.copy_(weight)

    def new_grads(self, rules: GradRules) -> Grads:
        """See `Masters.new_grads`: on the device, where owners get what they lack of them."""
        return Grads(self.bucket, rules)

    def ranges(self, index: int) -> list[tuple[int, int]]:
        """See `Masters.ranges`."""
        everything = (0, self.bucket.layout.sizes[index])
        owner = self.owners[index]
        return [everything if rank == owner else (0, 0) for rank in range(self.bucket.world)]

    @torch.no_grad()
    def gradients(self, grads: Grads) -> list[Tensor | None]:
        """See `Masters.gradients`: full ones, on their masters' device. Collective."""
        shard = grads.shard
        if shard is None or not any(grads.used):
            return [None] * len(self.fragments)
        found = self._collect(shard)
        used = grads.used
        return [
            self._whole(p, shard, found).to(p.master.device) if p.numel and used[p.index] else None
            for p in self.fragments
        ]
