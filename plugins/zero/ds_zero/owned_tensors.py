"""Whole tensors for optimizers that need them (LAMB's norms, Muon's matrices), under every stage.

Parameters, gradients and their reductions stay cut by elements. Only the optimizer's view differs: each parameter has
one owner among its replicas, who holds its master weights and states whole, in its own shape, and has its gradient at
the step. The others have an empty tensor in its place, so groups are as long as the user made them.

[Note: owners] A parameter that lies whole in one rank's part stays there: nothing of it ever moves. Those that the
parts' borders cut go to the rank with the least so far, largest first. So no rank has more than an equal share and one
tensor, and only cut tensors travel: of each bucket, their gradients to the owners before the step and their weights
back after it, one exchange each.

[Note: order] Parts are consecutive ranges of a bucket, so what ranks 0, 1, 2... send of my tensors arrives as my
tensors one after the other: whole gradients are views of what was received, with no further copy.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_zero.flat import FlatBucket, Piece, Share

if TYPE_CHECKING:
    from ds_core.context import Context

__all__ = ["WholeTensors", "choose_owners", "regroup"]


def choose_owners(sizes: Sequence[int], homes: Sequence[int | None], world: int) -> list[int]:
    """The owner of each tensor; no rank gets more than ``sum(sizes) / world + max(sizes)``. See [Note: owners].

    homes: the rank in whose part a tensor lies whole, None for one that is cut (or empty).
    """
    room = sum(sizes) / world + max(sizes, default=0)
    owners, loads = [-1] * len(sizes), [0] * world
    for index, (size, home) in enumerate(zip(sizes, homes, strict=True)):
        # Padding makes the first ranks' parts fuller; over very many tiny buckets that could add up.
        if home is not None and loads[home] + size <= room:
            owners[index] = home
            loads[home] += size
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for index in sorted((i for i, o in enumerate(owners) if o < 0), key=lambda i: -sizes[i]):
        load, owners[index] = heap[0]
        heapq.heapreplace(heap, (load + sizes[index], owners[index]))
    return owners


def regroup(ctx: Context, buckets: Sequence[FlatBucket]) -> None:
    """Choose owners for all parameters of `buckets` and give them their masters. Collective over the replicas."""
    by_axes: dict[tuple[str, ...], list[FlatBucket]] = {}
    for bucket in buckets:
        by_axes.setdefault(bucket.axes, []).append(bucket)
    for members in by_axes.values():
        places = [(b, i) for b in members for i in range(len(b.params))]
        sizes = [b.layout.sizes[i] * _master_dtype(ctx, b).itemsize for b, i in places]
        owners = choose_owners(sizes, [_home(b, i) for b, i in places], members[0].world)
        for bucket in members:
            mine, owners = owners[: len(bucket.params)], owners[len(bucket.params) :]
            bucket.whole = WholeTensors(bucket, mine, _master_dtype(ctx, bucket))


def _home(bucket: FlatBucket, index: int) -> int | None:
    """The rank in whose part a parameter lies whole."""
    ranks = bucket.layout.ranks(index)
    return ranks[0] if len(ranks) == 1 else None


def _master_dtype(ctx: Context, bucket: FlatBucket) -> torch.dtype:
    wanted = ctx.precision.master
    return wanted if wanted is not None and bucket.full.is_floating_point() else bucket.dtype


class WholeTensors:
    """One bucket's parameters as the optimizer sees them.

    pieces: per parameter, [0, numel) with the whole master here, or [0, 0) with an empty one where another rank owns
    it. owners: per parameter, the rank in the bucket's group.
    """

    def __init__(self, bucket: FlatBucket, owners: Sequence[int], dtype: torch.dtype) -> None:
        self.bucket, self.owners = bucket, list(owners)
        layout, rank = bucket.layout, bucket.rank
        moving = [i for i, owner in enumerate(owners) if layout.sizes[i] and owner != _home(bucket, i)]
        self._moves = bool(moving)  # equal on all ranks
        self._arriving = [i for i in moving if owners[i] == rank]
        leaving = [(owners[i], i) for i in moving if rank in layout.ranks(i)]
        self._leaving = [layout.span(i, rank) for _, i in sorted(leaving)]
        self._sends, self._takes = [0] * bucket.world, [0] * bucket.world
        for (owner, _), span in zip(sorted(leaving), self._leaving, strict=True):
            self._sends[owner] += span.stop - span.start
        for index in self._arriving:
            for source in layout.ranks(index):
                span = layout.span(index, source)
                self._takes[source] += span.stop - span.start
        self._device = bucket.full.device  # of weights and exchanges; masters, or parts, may rest on the host
        self._views = self._aliases(dtype)
        self.pieces = [self._piece(i, dtype) for i in range(len(bucket.params))]
        self.refresh()

    def _aliases(self, dtype: torch.dtype) -> dict[int, Tensor]:
        """Where a master needs no memory of its own: the weight is here whole and in its dtype."""
        if dtype != self.bucket.dtype or self.bucket.home.masters is not None or self.bucket.part_rests:
            return {}
        owned = [i for i, owner in enumerate(self.owners) if owner == self.bucket.rank]
        if self.bucket.share is Share.WHOLE:
            return {i: self.bucket.view(self.bucket.full, i) for i in owned}
        return {i: self._in_part(self.bucket.part, i) for i in owned if i not in self._arriving}

    def _in_part(self, part: Tensor, index: int) -> Tensor:
        """Parameter `index`, which lies whole in this rank's part, in its shape."""
        return part[self.bucket.pieces[index].within].view(self.bucket.shapes[index])

    def _piece(self, index: int, dtype: torch.dtype) -> Piece:
        bucket = self.bucket
        param, shape = bucket.params[index], bucket.shapes[index]
        if self.owners[index] == bucket.rank:
            values = self._views.get(index)
            if values is None and bucket.home.masters is not None:
                values = bucket.home.masters.buffer(bucket.layout.sizes[index], dtype).view(shape)
            elif values is None:
                values = torch.empty(shape, dtype=dtype, device=self._device)
        else:  # with as many dimensions, since some optimizers look
            device = self._device if bucket.home.masters is None else torch.device("cpu")
            values = torch.empty((0, *shape[1:]), dtype=dtype, device=device)
        count = bucket.layout.sizes[index] if self.owners[index] == bucket.rank else 0
        master = nn.Parameter(values, requires_grad=param.requires_grad)
        return Piece(bucket.names[index], param, shape, index, 0, count, 0, master)

    @property
    def _owned(self) -> list[Piece]:
        return [p for p in self.pieces if p.stop > p.start]

    # -- exchanges -------------------------------------------------------------------------------------------

    def _collect(self, part: Tensor) -> dict[int, Tensor]:
        """What this rank owns of tensors that do not lie in its part, from the `part` of each rank, flat."""
        if not self._moves:
            return {}
        source = torch.cat([part[:0], *(part[s.at : s.at + s.stop - s.start] for s in self._leaving)])
        source = source.to(self._device)
        out = source.new_empty(sum(self._takes))
        comm.all_to_all_single(out, source, self._takes, self._sends, group=self.bucket.group)
        sizes = [self.bucket.layout.sizes[i] for i in self._arriving]
        return dict(zip(self._arriving, out.split(sizes), strict=True))

    def _local(self, index: int) -> bool:
        """Whether the weight of an owned parameter lies in this rank's part, apart from its master."""
        return index not in self._views and index not in self._arriving

    def copies(self) -> list[Tensor | None]:
        """See `FlatBucket.copies`."""
        part = self.bucket.part
        here = [p.stop > p.start and self._local(p.index) and p.master.device == part.device for p in self.pieces]
        here = [h and p.master.dtype != part.dtype for h, p in zip(here, self.pieces, strict=True)]
        return [self._in_part(part, p.index) if h else None for h, p in zip(here, self.pieces, strict=True)]

    @torch.no_grad()
    def send(self) -> None:
        """Write the owners' masters into the parts of all ranks, but for `copies`. Collective."""
        part = self.bucket.part
        for piece, copy in zip(self.pieces, self.copies(), strict=True):
            if piece.stop > piece.start and copy is None and self._local(piece.index):
                self._in_part(part, piece.index).copy_(piece.master)
        if not self._moves:
            return
        mine = [self.pieces[i].master.reshape(-1).to(part.dtype) for i in self._arriving]
        source = torch.cat(mine or [part[:0]]).to(self._device)
        out = source.new_empty(sum(self._sends))
        comm.all_to_all_single(out, source, self._sends, self._takes, group=self.bucket.group)
        for span, values in zip(self._leaving, out.split([s.stop - s.start for s in self._leaving]), strict=True):
            part[span.at : span.at + values.numel()].copy_(values)

    @torch.no_grad()
    def refresh(self) -> None:
        """Make masters from the weights. Collective in stage 3, where no rank has them whole."""
        bucket = self.bucket
        whole = bucket.share is Share.WHOLE
        found = {} if whole else self._collect(bucket.part)
        for piece in self._owned:
            if piece.index in self._views:
                continue
            if whole:
                weight = bucket.view(bucket.full, piece.index)
            elif piece.index in found:
                weight = found[piece.index].view(piece.shape)
            else:
                weight = self._in_part(bucket.part, piece.index)
            piece.master.copy_(weight)

    @torch.no_grad()
    def gradients(self, part: Tensor, used: Sequence[bool]) -> list[Tensor | None]:
        """The whole gradient of each piece, on its master's device, out of each rank's reduced `part`. Collective.

        used: per parameter, whether any rank had a gradient for it (without, the master gets none either).
        """
        found = self._collect(part)
        grads: list[Tensor | None] = []
        for piece in self.pieces:
            grad = None
            if piece.stop > piece.start and used[piece.index]:
                flat = found.get(piece.index)
                grad = self._in_part(part, piece.index) if flat is None else flat.view(piece.shape)
                grad = grad.to(piece.master.device)
            grads.append(grad)
        return grads
