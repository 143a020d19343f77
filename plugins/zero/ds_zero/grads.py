"""Gradients on their way from backward to the part of the rank that owns them.

Each bucket gathers its gradients in a flat buffer (`Grads.local`); a full buffer is reduced to its owners while
backward goes on, and what arrives is added to this rank's part (`Grads.part`). Buckets travel in one fixed order on
all ranks.

[Note: flags] At the end of each reduction ranks exchange one byte per parameter ("I had a gradient") and one per
bucket ("gradients came after it had left", as nested backwards make them: then it travels once more). So a parameter
that nobody used keeps ``grad=None`` as in one-process torch, and ranks whose control flow differs stay together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.buckets import GradState, averaging_factors, wire_dtype
from ds_core.params import GradGroup
from ds_zero.gradient_source import GradientSource

if TYPE_CHECKING:
    from ds_zero.base import ZeroPartitioner
    from ds_zero.flat import FlatBucket

__all__ = ["Grads", "Reducer"]

IN_FLIGHT = 2
"""Buckets travelling at a time from stage 2 on: one is being reduced while the next one leaves."""


class _Pool:
    """Flat buffers that are used again, since fresh memory costs more than the copy into it.

    most: how many may lie free, the oldest go first; None: any number.
    """

    def __init__(self, most: int | None) -> None:
        self._free: list[Tensor] = []
        self._most = most

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        for place, tensor in enumerate(self._free):
            if (tensor.numel(), tensor.dtype, tensor.device) == (numel, dtype, device):
                return self._free.pop(place)
        return torch.empty(numel, dtype=dtype, device=device)

    def give(self, tensor: Tensor) -> None:
        self._free.append(tensor)
        if self._most is not None and len(self._free) > self._most:
            del self._free[0]

    def clear(self) -> None:
        self._free.clear()


class Grads:
    """The gradients of one bucket.

    local: this rank's, not reduced yet, laid out as the bucket; filled: which of them it holds. part: what this rank
    owns of the reduced ones; None: nothing was reduced yet. whole: the buffer that `part` lies in, if any.
    host: memory for the part where the optimizer's step is the host's.
    used: parameters that had a gradient since the last step.
    """

    def __init__(self, bucket: FlatBucket) -> None:
        self.bucket = bucket
        count = len(bucket.params)
        self.local: Tensor | None = None
        self.filled = [False] * count
        self.used = [False] * count
        self.part: Tensor | None = None
        self.whole: Tensor | None = None
        self.host: Tensor | None = None
        self.arrived: set[int] = set()
        self.awaited = count

    def land(self, out: Tensor, accumulate: torch.dtype | None, *, once: bool) -> None:
        """Start adding the device's `out` to the part, which is on the host.

        accumulate: its dtype; None: the masters', but where `once` nothing else should come, and `out` stays as it is.
        """
        home, first = self.bucket.home, self.part is None
        assert home.masters is not None and home.transfers is not None
        wide = accumulate or self.bucket.master.dtype
        if first:
            self._take_host(out.dtype if once and accumulate is None else wide)
        elif self.part is not None and self.part.dtype != wide:
            home.transfers.settle()
            narrow = self.part
            self._take_host(wide)
            self.part.copy_(narrow)
        assert self.part is not None
        home.transfers.to_host(self.part, out, add=not first)

    def _take_host(self, dtype: torch.dtype) -> None:
        """Memory that is there and of no smaller dtype serves."""
        store = self.bucket.home.masters
        assert store is not None
        if self.host is None or self.host.dtype.itemsize < dtype.itemsize:
            self.host = store.buffer(self.bucket.layout.part, dtype)
        self.part = self.host

    def begin_part(self, dtype: torch.dtype, accumulate: torch.dtype | None) -> None:
        """Begin the part with zeros, before anything was reduced; what will be is added to it."""
        if self.bucket.host_steps:
            self._take_host(accumulate or self.bucket.master.dtype)
            assert self.part is not None
            self.part.zero_()
        else:
            self.part = torch.zeros(self.bucket.layout.part, dtype=dtype, device=self.bucket.full.device)

    def drop(self) -> None:
        """Forget all gradients."""
        self.local = self.part = self.whole = None


@dataclass(slots=True)
class _Travelling:
    """A reduction under way: `out` will hold this rank's part of the sum of `source` over ranks."""

    grads: Grads
    works: list[Any]
    source: Tensor
    out: Tensor


class Reducer(GradientSource):
    """Reduces gradients to the ranks that own them. See the module's docstring.

    groups: per replica axes the process group that reductions use.
    order: which buckets travel after which, asked at the start of each backward; equal on all ranks.
    """

    def __init__(
        self,
        owner: ZeroPartitioner,
        buckets: Sequence[FlatBucket],
        groups: Callable[[FlatBucket], Any],
        order: Callable[[], Sequence[FlatBucket]] | None = None,
    ) -> None:
        super().__init__(owner, buckets)
        self._group, self._order = groups, order
        self._all = {b: Grads(b) for b in buckets}
        self._place = {p: (self._all[b], i) for b in buckets for i, p in enumerate(b.params)}
        self._queue: list[Grads] = []
        self._next = 0
        self._travelling: deque[_Travelling] = deque()
        self._wires: dict[FlatBucket, torch.dtype] = {}
        self._state = GradState.LOCAL
        self._before, self._after = averaging_factors(self.ctx)
        self._keeps = self.section.stage == 1
        self._pool = _Pool(None if self._keeps else 2 * IN_FLIGHT)
        # A gradient can stay in param.grad only where it accumulates in the parameter's own dtype.
        self._eager = self.section.contiguous_gradients or self.ctx.precision.accumulate is not None

    # -- backward --------------------------------------------------------------------------------------------

    @property
    def _reduces(self) -> bool:
        """Whether the running backward is to reduce gradients."""
        owner = self.owner
        return not owner.hold and (owner.sync or owner.partitions_gradients)

    def begin(self, changed: bool) -> None:
        """See `Partitioner.begin`."""
        if changed:
            for grads in self._all.values():
                grads.awaited = sum(p.requires_grad for p in grads.bucket.params)
        self._state = GradState.LOCAL
        if self._reduces:
            self._start()

    def on_gradient(self, param: nn.Parameter) -> None:
        """See `Partitioner.on_gradient`."""
        if param not in self._place:
            return
        grads, index = self._place[param]
        if self._eager:
            self._absorb(grads, index)
        if self._state is GradState.RUNNING:
            grads.arrived.add(index)
            self._advance()

    @torch.no_grad()
    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        """See `GradientSource.add`."""
        if param in self._place:
            self._state = GradState.LOCAL if self._state is GradState.REDUCED else self._state
            self._absorb(*self._place[param], grad)

    @torch.no_grad()
    def _absorb(self, grads: Grads, index: int, grad: Tensor | None = None) -> None:
        """Move a parameter's gradient (or `grad`) into the flat buffer."""
        bucket = grads.bucket
        param = bucket.params[index]
        given, grad = grad is not None, param.grad if grad is None else grad
        assert grad is not None
        if grads.local is None:
            if not self._keeps:
                self._drain(IN_FLIGHT - 1)
            grads.local = self._pool.take(bucket.layout.total, self._dtype(bucket), bucket.full.device)
        view = bucket.view(grads.local, index)
        if grad.is_sparse:  # of nn.Embedding(sparse=True)
            grad = grad.to_dense()
        if grads.filled[index]:
            self.ctx.kernels.accumulate(view, grad)
        else:
            view.copy_(grad)
        grads.filled[index] = True
        if not given:
            param.grad = None

    def _start(self) -> None:
        """Prepare for one backward."""
        self._state = GradState.RUNNING
        self._wires = self._wires or {b: self._wire(b) for b in self._all}
        self._next = 0
        order = self._order() if self._order is not None else list(self._all)
        self._queue = [self._all[b] for b in order if self._all[b].awaited]
        for grads in self._queue:
            grads.arrived.clear()

    def _wire(self, bucket: FlatBucket) -> torch.dtype:
        """The dtype in which a bucket travels: the widest that any of its parameters asks for."""
        wanted = [wire_dtype(p, self.ctx) for p in bucket.params]
        wire = wanted[0]
        for dtype in wanted[1:]:
            wire = torch.promote_types(wire, dtype)
        return wire

    def _advance(self) -> None:
        # [Note: several engines] Buckets are waited for in backward, too, to keep few in memory. If ranks came to the
        # engines' parts in different orders, each would wait for a bucket of another engine. So only the engine that
        # runs the backward sends before its end.
        if not self.owner.may_wait:
            return
        while self._next < len(self._queue) and len(self._queue[self._next].arrived) >= self._queue[self._next].awaited:
            self._launch(self._queue[self._next])
            self._next += 1

    # -- reduction -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _launch(self, grads: Grads) -> None:
        """Start reducing what the bucket has; parameters without a gradient count as zeros."""
        bucket = grads.bucket
        for index, param in enumerate(bucket.params):
            if param.grad is not None:
                self._absorb(grads, index)
        source = grads.local
        if source is None:
            source = self._pool.take(bucket.layout.total, self._dtype(bucket), bucket.full.device)
        for index, filled in enumerate(grads.filled):
            if filled:
                grads.used[index] = True
            else:
                bucket.view(source, index).zero_()
        source[sum(bucket.layout.sizes) :].zero_()
        grads.local, grads.filled = None, [False] * len(bucket.params)
        wire = self._wires[bucket]
        if source.dtype != wire and bucket.world > 1:
            cast = self._pool.take(source.numel(), wire, source.device).copy_(source)
            self._pool.give(source)
            source = cast
        if self._before != 1.0:
            source.mul_(self._before)
        self._travelling.append(self._send(grads, source))
        if not self.section.overlap:
            self._drain(0)

    def _send(self, grads: Grads, source: Tensor) -> _Travelling:
        """Start the reduction. What stage 1 keeps anyway, it reduces in place."""
        bucket, group = grads.bucket, self._group(grads.bucket)
        if bucket.world == 1:
            return _Travelling(grads, [], source, source)
        mine = bucket.own(source)
        comm.label(bucket.about_gradients)
        if self.section.reduce_scatter:
            out = mine if self._keeps else self._pool.take(mine.numel(), mine.dtype, mine.device)
            works = [comm.reduce_scatter_tensor(out, source, group=group, async_op=True)]
            return _Travelling(grads, works, source, out)
        if self.section.use_multi_rank_bucket_allreduce:
            works = [comm.all_reduce(source, group=group, async_op=True)]
        else:
            ranks, parts = torch.distributed.get_process_group_ranks(group), bucket.parts(source)
            works = [comm.reduce(parts[i], dst=rank, group=group, async_op=True) for i, rank in enumerate(ranks)]
        return _Travelling(grads, works, source, mine)

    def _drain(self, left: int) -> None:
        """Take in reductions, the oldest first, until at most `left` are under way."""
        while len(self._travelling) > left:
            self._take_in(self._travelling.popleft())

    @torch.no_grad()
    def _take_in(self, done: _Travelling) -> None:
        """Wait for a reduction and add it to what this rank owns."""
        for work in done.works:
            work.wait()
        grads, out, bucket = done.grads, done.out, done.grads.bucket
        if self._after != 1.0:
            out.mul_(self._after)
        inside = out.data_ptr() == bucket.own(done.source).data_ptr()
        dtype = self._dtype(bucket)
        if bucket.host_steps:
            grads.land(out, self.ctx.precision.accumulate, once=self.ctx.batch.gas == 1)
        elif grads.part is None and out.dtype == dtype and (not inside or self._keeps or bucket.world == 1):
            grads.part, grads.whole = out, done.source if inside else None
        elif grads.part is None:
            grads.part = self._pool.take(out.numel(), dtype, out.device).copy_(out)
        else:
            self.ctx.kernels.accumulate(grads.part, out)
        if grads.whole is not done.source:
            self._pool.give(done.source)
        if not inside and grads.part is not out:
            self._pool.give(out)

    def _settle(self) -> None:
        """Wait for what is on its way to the host."""
        for transfers in {b.home.transfers for b in self._all if b.home.transfers is not None}:
            transfers.settle()

    def _dtype(self, bucket: FlatBucket) -> torch.dtype:
        """The dtype in which gradients accumulate."""
        return (self.ctx.precision.accumulate if bucket.full.is_floating_point() else None) or bucket.dtype

    def finish(self) -> None:
        """See `Partitioner.finish`."""
        if not self._reduces or self._state is GradState.REDUCED:
            return
        if self._state is GradState.LOCAL:
            self._start()
        for grads in self._queue[self._next :]:
            self._launch(grads)
        for grads in self._agree():
            self._launch(grads)
        self._drain(0)
        self._settle()
        self._state = GradState.REDUCED
        if not self._keeps:
            self._pool.clear()

    def _agree(self) -> list[Grads]:
        """Let ranks know which parameters anybody used; the buckets that must travel again. See [Note: flags]."""
        by_axes: dict[tuple[str, ...], list[Grads]] = {}
        for grads in self._queue:
            by_axes.setdefault(grads.bucket.axes, []).append(grads)
        again = []
        for members in by_axes.values():
            late = [g.local is not None or any(p.grad is not None for p in g.bucket.params) for g in members]
            used = [u for g in members for u in g.used]
            if members[0].bucket.world > 1:
                flags = torch.tensor(late + used, dtype=torch.uint8, device=members[0].bucket.full.device)
                comm.label("flags of gradients, at the end of backward")
                comm.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=self._group(members[0].bucket))
                agreed = [bool(f) for f in flags.tolist()]
                late, used = agreed[: len(members)], agreed[len(members) :]
            for grads in members:
                count = len(grads.used)
                grads.used, used = used[:count], used[count:]
            again += [grads for grads, is_late in zip(members, late, strict=True) if is_late]
        return again

    # -- step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def gradients(self) -> list[GradGroup]:
        """See `GradientSource.gradients`."""
        self.refuse_unused(g.used for g in self._all.values())
        return self.grouped([self._mine(b, g) for b, g in self._all.items()])

    def _mine(self, bucket: FlatBucket, grads: Grads) -> list[Tensor | None]:
        """The gradients of what this rank updates of `bucket`."""
        part = grads.part
        if bucket.whole is not None and not self._keeps:
            grads.part = None  # whatever of it the optimizer needs, its gradients refer to
        if part is None or not any(grads.used):
            return [None] * len(bucket.pieces)
        if bucket.whole is not None:
            return bucket.whole.gradients(part, grads.used)
        used = (grads.used[p.index] and p.stop > p.start for p in bucket.pieces)
        return [part[p.within] if u else None for p, u in zip(bucket.pieces, used, strict=True)]

    def grads(self, bucket: FlatBucket) -> Grads | None:
        """See `GradientSource.grads`."""
        return self._all.get(bucket)

    def tensors(self, bucket: FlatBucket, *, reduced: bool) -> Iterable[Tensor | None]:
        """See `GradientSource.tensors`."""
        if (grads := self._all.get(bucket)) is None:
            return []
        return [grads.part, grads.whole, *(p.grad for p in bucket.params)] if reduced else [grads.local]

    @property
    def any_gradient(self) -> bool:
        """See `GradientSource.any_gradient`."""
        found = any(any(g.used) or any(g.filled) for g in self._all.values())
        return found or any(p.grad is not None for p in self._place)

    def used(self, bucket: FlatBucket) -> bool:
        """See `GradientSource.used`."""
        return bucket in self._all and any(self._all[bucket].used)

    def zero_grad(self) -> None:
        """See `GradientSource.zero_grad`."""
        self._drain(0)
        self._settle()
        self._state = GradState.LOCAL
        self.given = []
        for bucket, grads in self._all.items():
            for tensor in (grads.local, grads.part if grads.whole is None else grads.whole):
                if tensor is not None and tensor is not grads.host and self._keeps:
                    self._pool.give(tensor)
            grads.drop()
            grads.filled = [False] * len(bucket.params)
            grads.used = [False] * len(bucket.params)
            for piece in bucket.optimized:
                piece.master.grad = None
                piece.param.grad = None

    def detach(self) -> None:
        """See `GradientSource.detach`."""
        self._drain(0)
        self._settle()
        self._pool.clear()
        for grads in self._all.values():
            grads.drop()
