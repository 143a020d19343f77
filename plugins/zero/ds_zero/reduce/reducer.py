"""Reduction of gradients to the shards of the ranks that own them.

Each bucket collects its gradients in a flat buffer (`Grads.local`). A complete buffer is reduced to
its owners while backward goes on, and the result is added to this rank's shard (`Grads.shard`). All
ranks reduce buckets in one order.

[Note: flags] At the end of each reduction ranks exchange one byte per parameter ("I had a
gradient") and one per bucket ("gradients came after its reduction", as in nested backwards: then it
is reduced once more). So a parameter that no rank used keeps ``grad=None`` as in one-process torch,
and ranks whose control flow differs stay in step.

[Note: reduced] Who wants to begin with a bucket before the end of backward sets
`Reducer.on_reduced`. It is called at an accumulation boundary only, when the shard has all that was
accumulated. What it cannot know yet: which parameters the other ranks used (one that this rank used
is used), whether gradients are finite, their norm, and that no gradient comes late (then it is
called again for that bucket, in `Reducer.finish`, or after the next `begin`).
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core import comm
from ds_core.gradients import averaging_factors, wire_dtype
from ds_core.partition import BackwardPlan, GradGroup, GradState, squared_norm
from ds_core.process import log_once
from ds_zero.comm.collectives import Chain
from ds_zero.reduce.bucket_grads import BufferPool, GradRules, Grads
from ds_zero.reduce.source import GradientSource

if TYPE_CHECKING:
    from ds_zero.base import ZeroPartitioner
    from ds_zero.buckets.flat import FlatBucket
    from ds_zero.buckets.records import Fragment

log = logging.getLogger("ds_zero")

IN_FLIGHT = 2
"""Reductions running at a time from stage 2 on: one bucket is reduced while the next one is filled.
"""

FLYING = 16 << 20
"""Bytes of buckets that may be in reduction in any case. Two small ones do not fill the link
between two hosts, since each also waits for the ranks to come to it."""


def crowded(flying: Iterable[int]) -> bool:
    """Whether the oldest reduction has to end before a buffer is used.

    flying: bytes of each bucket that is being reduced.
    """
    sizes = list(flying)
    return len(sizes) >= IN_FLIGHT and sum(sizes) > FLYING


@dataclass(slots=True)
class _Reduction:
    """A running reduction: `out` will be this rank's shard of the sum of `source` over ranks."""

    grads: Grads
    works: list[Any]
    source: Tensor
    out: Tensor


class Reducer(GradientSource):
    """Reduces gradients to the ranks that own them. See the module's docstring."""

    on_reduced: Callable[[FlatBucket], None] | None = None
    """Called when a bucket's shard has all that was accumulated. See [Note: reduced]."""

    on_late: Callable[[FlatBucket], None] | None = None
    """Called before more gradients are added to a shard that is reduced already."""

    def __init__(self, owner: ZeroPartitioner, buckets: Sequence[FlatBucket]) -> None:
        super().__init__(owner, buckets)

        # -- how buckets are reduced --
        # Sums become means by these factors: one before the reduction, one after it.
        self._before, self._after = averaging_factors(self.ctx, self.ctx.mesh.size("dp"))
        # The dtype that each bucket's gradients are sent in. Filled in the first backward: autocast
        # may list its parameters after `attach`.
        self._sent_dtypes: dict[FlatBucket, torch.dtype] = {}
        # A gradient can stay in param.grad only where it accumulates in the parameter's own dtype.
        self._eager = self.section.contiguous_gradients or self.ctx.precision.accumulate is not None
        # Plugins that change reduced gradients.
        self._shown = self.ctx.plugins.implementing("ds_gradients")

        # -- memory --
        # Stage 1 reduces in place and has all buffers alive in the step, so it keeps them.
        self._keeps = self.section.stage == 1
        self._pool = BufferPool(None if self._keeps else 2 * IN_FLIGHT)
        rules = GradRules(
            accumulate=self.ctx.precision.accumulate,
            once=self.ctx.batch.gas == 1,
            keeps=self._keeps,
            pool=self._pool,
            add=self.ctx.kernels.accumulate,
            squares=self._squares,
        )
        self._all = {b: b.masters.new_grads(rules) for b in buckets}
        self._index_of = {p: (self._all[b], i) for b in buckets for i, p in enumerate(b.params)}

        # -- the running backward --
        self._plan = BackwardPlan()
        # The state of the whole backward; each bucket's `Grads` has its own.
        self._state = GradState.LOCAL
        # Buckets in the order in which they are reduced, and the place of the next one.
        self._queue: list[Grads] = []
        self._next = 0
        # The oldest one first.
        self._in_flight: deque[_Reduction] = deque()

    # -- backward ----------------------------------------------------------------------------------

    @property
    def _reduces(self) -> bool:
        """Whether the running backward reduces gradients."""
        plan = self._plan
        return not plan.keep_local and (plan.reduce or self.owner.partitions_gradients)

    def begin(self, plan: BackwardPlan) -> None:
        """See `Partitioner.begin`."""
        self._plan = plan
        if plan.changed:
            # Parameters were frozen or thawed: count those that will have a gradient.
            for grads in self._all.values():
                grads.awaited = sum(p.requires_grad for p in grads.bucket.params)
        self._state = GradState.LOCAL
        if self._reduces:
            self._start()

    def on_gradient(self, param: nn.Parameter) -> None:
        """See `Partitioner.on_gradient`."""
        if param not in self._index_of:
            return
        grads, index = self._index_of[param]
        if self._eager:
            self._copy_in(grads, index)
        if self._state is GradState.RUNNING:
            grads.arrived.add(index)
            self._advance()

    @torch.no_grad()
    def add(self, param: nn.Parameter, grad: Tensor) -> None:
        """See `GradientSource.add`."""
        if param in self._index_of:
            # What was reduced is not all any more: `finish` has work again.
            self._state = GradState.LOCAL if self._state is GradState.REDUCED else self._state
            self._copy_in(*self._index_of[param], grad)

    @torch.no_grad()
    def _copy_in(self, grads: Grads, index: int, grad: Tensor | None = None) -> None:
        """Move a parameter's gradient (or `grad`) into the flat buffer."""
        bucket = grads.bucket
        param = bucket.params[index]
        given = grad is not None
        grad = param.grad if grad is None else grad
        assert grad is not None
        if grads.local is None:
            # A new buffer is needed: the oldest reduction gives one back.
            while not self._keeps and crowded(r.source.nbytes for r in self._in_flight):
                self._complete(self._in_flight.popleft())
        view = bucket.view(grads.collect(), index)
        if grad.is_sparse:  # of nn.Embedding(sparse=True)
            grad = grad.to_dense()
        if grads.filled[index]:
            self.ctx.kernels.accumulate(view, grad)
        else:
            view.copy_(grad)
        grads.filled[index] = True
        # A gradient of the caller's is added to param.grad's, which still has to come here.
        if not given:
            param.grad = None

    def _start(self) -> None:
        """Prepare for one backward."""
        self._state = GradState.RUNNING
        self._sent_dtypes = self._sent_dtypes or {b: self._sent_dtype(b) for b in self._all}
        self._next = 0
        # Frozen buckets, the same on all ranks, are not reduced.
        self._queue = [self._all[b] for b in self.owner.reduce_order() if self._all[b].awaited]
        for grads in self._queue:
            grads.arrived.clear()

    def _sent_dtype(self, bucket: FlatBucket) -> torch.dtype:
        """The dtype in which a bucket is reduced: the widest that any of its parameters
        needs."""
        return functools.reduce(
            torch.promote_types, (wire_dtype(p, self.ctx) for p in bucket.params)
        )

    def _advance(self) -> None:
        # [Note: several engines] Buckets are waited for in backward, too, to keep few in memory. If
        # ranks came to the engines' parts in different orders, each would wait for a bucket of
        # another engine. So only the engine that runs the backward sends before its end.
        if not self._plan.may_wait:
            return
        while (
            self._next < len(self._queue)
            and len(self._queue[self._next].arrived) >= self._queue[self._next].awaited
        ):
            self._launch(self._queue[self._next])
            self._next += 1

    # -- reduction ---------------------------------------------------------------------------------

    @torch.no_grad()
    def _launch(self, grads: Grads) -> None:
        """Start to reduce a bucket; parameters without a gradient count as zeros."""
        bucket = grads.bucket
        # Those that were left in param.grad, see `contiguous_gradients`.
        for index, param in enumerate(bucket.params):
            if param.grad is not None:
                self._copy_in(grads, index)
        # The shard to which the result is added is read while the reduction runs.
        grads.expect()
        source = grads.launch()
        sent = self._sent_dtypes[bucket]
        if source.dtype != sent and bucket.reduces:
            cast = self._pool.get(source.numel(), sent, source.device).copy_(source)
            self._pool.put(source)
            source = cast
        if self._before != 1.0:
            source.mul_(self._before)
        self._in_flight.append(self._send(grads, source))
        if not self.section.overlap:
            self._drain(0)

    def _send(self, grads: Grads, source: Tensor) -> _Reduction:
        """Start the reduction; in place in stage 1, which keeps the buffer."""
        bucket = grads.bucket
        if not bucket.reduces:
            return _Reduction(grads, [], source, source)
        # [Note: chains] The later collectives of a `Chain` begin where the next bucket's first one
        # does: the same place on all ranks, and a bucket's backward later.
        for earlier in self._in_flight:
            for work in earlier.works:
                if isinstance(work, Chain):
                    work.advance()
        comm.label(bucket.about_gradients)
        reduce = self.owner.reduction(bucket)
        works, out = reduce(bucket, source, self.owner.reduce_group(bucket), self._room)
        return _Reduction(grads, works, source, out)

    def _room(self, bucket: FlatBucket, source: Tensor) -> Tensor:
        """Where the reduced shard of `source` goes."""
        if self._keeps:
            return bucket.own_shard(source)
        return self._pool.get(bucket.layout.shard_numel, source.dtype, source.device)

    def _drain(self, left: int) -> None:
        """Complete reductions, the oldest first, until at most `left` are running."""
        while len(self._in_flight) > left:
            self._complete(self._in_flight.popleft())

    @torch.no_grad()
    def _complete(self, done: _Reduction) -> None:
        """Wait for a reduction, and add it to this rank's shard."""
        for work in done.works:
            work.wait()
        grads = done.grads
        out = done.out
        bucket = done.grads.bucket
        if self._after != 1.0:
            out.mul_(self._after)
        if self.on_late is not None and grads.shard is not None:
            self.on_late(bucket)
        grads.complete(out, done.source)
        if self.on_reduced is not None and self._plan.reduce:
            self.on_reduced(bucket)

    def finish(self, plan: BackwardPlan) -> None:
        """See `Partitioner.finish`."""
        self._plan = plan
        if not self._reduces or self._state is GradState.REDUCED:
            return
        if self._state is GradState.LOCAL:
            self._start()
        # Buckets that still lack gradients: other ranks may have them, so all ranks must reduce
        # them.
        for grads in self._queue[self._next :]:
            self._launch(grads)
        # Buckets that any rank had more gradients for since they were reduced.
        for grads in self._agree():
            self._launch(grads)
        self._drain(0)
        self.owner.offload.synchronize()
        self._state = GradState.REDUCED
        # Forward and the step need the memory more than the next backward does.
        if not self._keeps:
            self._pool.clear()

    def _agree(self) -> list[Grads]:
        """Agree on which parameters any rank used; the buckets to be reduced again.

        See [Note: flags].
        """
        by_axes: dict[tuple[str, ...], list[Grads]] = {}
        for grads in self._queue:
            by_axes.setdefault(grads.bucket.replicas, []).append(grads)
        again = []
        for members in by_axes.values():
            # Of each bucket whether it is late, and which parameters were used.
            mine = [flag for grads in members for flag in (grads.is_late, *grads.used)]
            if members[0].bucket.reduces:
                flags = torch.tensor(mine, dtype=torch.uint8, device=members[0].bucket.full.device)
                comm.label("flags of gradients, at the end of backward")
                comm.all_reduce(
                    flags, op=torch.distributed.ReduceOp.MAX, group=self._everyone(members[0])
                )
                mine = [bool(flag) for flag in flags.tolist()]
            agreed = iter(mine)
            for grads in members:
                if next(agreed):
                    again.append(grads)
                grads.used = list(itertools.islice(agreed, len(grads.used)))
        return again

    def _everyone(self, grads: Grads) -> Any:
        """The group of all ranks that have the parameters."""
        # The group of reductions, since weights may be gathered on that of `replicas` meanwhile;
        # with ranks of other blocks those gathers are on another one.
        bucket = grads.bucket
        if bucket.outer:
            return self.ctx.mesh.group(*bucket.replicas)
        return self.owner.reduce_group(bucket)

    # -- step --------------------------------------------------------------------------------------

    @torch.no_grad()
    def gradients(self) -> list[GradGroup]:
        """See `GradientSource.gradients`."""
        self.refuse_unused(g.used for g in self._all.values())
        if self._shown and any(b.masters.evicts is not None for b in self._all):
            if self.ctx.rank == 0:
                log_once(
                    log,
                    logging.INFO,
                    f"{self._shown[0]} looks at all gradients: each step has them in memory",
                )
            for grads in self._all.values():
                grads.bring()
        mine: list[list[Tensor | None]] = []
        # Norms of shards that are not in memory, so that they are not read for the norm of all.
        norms: dict[FlatBucket, Tensor] = {}
        for bucket, grads in self._all.items():
            given = bucket.masters.gradients(grads)
            mine.append(given)
            if grads.norm is not None and any(g is not None for g in given):
                norms[bucket] = grads.norm
            # Full gradients are other tensors, or views that keep what they need of the shard.
            if bucket.masters.full_tensors and not self._keeps:
                grads.shard = None
        return self.grouped(mine, norms)

    def reduced(self, bucket: FlatBucket) -> list[Tensor]:
        """See `GradientSource.reduced`."""
        shard = self._all[bucket].shard
        return [] if shard is None else [shard]

    def _squares(self, tensors: list[Tensor]) -> Tensor:
        kind = tensors[0].device.type, str(tensors[0].dtype).removeprefix("torch.")
        squares: Tensor = self.ctx.kernels.get("squared_norm", *kind, squared_norm)(tensors)
        return squares

    def grads(self, bucket: FlatBucket) -> Grads | None:
        """See `GradientSource.grads`."""
        return self._all.get(bucket)

    def tensors(self, bucket: FlatBucket, *, reduced: bool) -> Iterable[Tensor | None]:
        """See `GradientSource.tensors`."""
        if (grads := self._all.get(bucket)) is None:
            return []
        return grads.tensors(reduced=reduced)

    @property
    def any_gradient(self) -> bool:
        """See `GradientSource.any_gradient`."""
        found = any(any(g.used) or any(g.filled) for g in self._all.values())
        return found or any(p.grad is not None for p in self._index_of)

    def used(self, bucket: FlatBucket) -> bool:
        """See `GradientSource.used`."""
        return bucket in self._all and any(self._all[bucket].used)

    def unused(self, bucket: FlatBucket) -> list[Fragment]:
        """See `GradientSource.unused`."""
        used = self._all[bucket].used
        return [p for p in bucket.fragments if not used[p.index] and p.numel]

    def zero_grad(self) -> None:
        """See `GradientSource.zero_grad`."""
        self._drain(0)
        self.owner.offload.synchronize()
        self._state = GradState.LOCAL
        self.given = []
        for bucket, grads in self._all.items():
            grads.drop()
            for fragment in bucket.masters.fragments:
                fragment.master.grad = None
                fragment.param.grad = None

    def detach(self) -> None:
        """See `GradientSource.detach`."""
        self._drain(0)
        self.owner.offload.synchronize()
        self._pool.clear()
        for grads in self._all.values():
            grads.forget()
