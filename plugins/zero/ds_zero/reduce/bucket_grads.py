"""The gradients of one bucket: this rank's own, and its shard of the reduced ones.

One class per place where the reduced shard waits for the step: on the device, in host memory, or
in a store that frees memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from ds_state_stores import StateStore, is_evicted
from torch import Tensor

from ds_core.partition import GradState
from ds_zero.buckets.sizes import choose_dtype, waiting_dtype

if TYPE_CHECKING:
    from jaxtyping import Shaped

    from ds_zero.buckets.flat import FlatBucket
    from ds_zero.offload.placement import Copy

_NEXT = {
    GradState.LOCAL: {GradState.LOCAL, GradState.RUNNING},
    # Late gradients are reduced behind those of the same bucket that are under way.
    GradState.RUNNING: {GradState.RUNNING, GradState.REDUCED},
    # A bucket without new gradients is reduced again where other ranks may have some.
    GradState.REDUCED: {GradState.LOCAL, GradState.RUNNING},
}


class BufferPool:
    """Flat buffers for reuse, since fresh memory costs more than the copy into it.

    most: how many free ones are kept, the oldest are freed first; None: any number.
    """

    def __init__(self, most: int | None) -> None:
        self._free: list[Tensor] = []
        self._most = most

    def get(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer with any values."""
        for index, tensor in enumerate(self._free):
            if (tensor.numel(), tensor.dtype, tensor.device) == (numel, dtype, device):
                return self._free.pop(index)
        return torch.empty(numel, dtype=dtype, device=device)

    def put(self, tensor: Tensor) -> None:
        """Nobody uses `tensor` any more."""
        self._free.append(tensor)
        if self._most is not None and len(self._free) > self._most:
            del self._free[0]

    def clear(self) -> None:
        """Free what is free."""
        self._free.clear()


@dataclass(frozen=True, slots=True)
class GradRules:
    """How one reducer accumulates gradients."""

    accumulate: torch.dtype | None
    """The dtype that the config wants; None: that of the weights, or of masters on the host."""

    once: bool
    """Whether a step has one micro-batch, so that a reduced shard usually is the only one."""

    keeps: bool
    """Whether flat buffers are kept between steps, as in stage 1."""

    pool: BufferPool
    """Memory for flat buffers and shards."""

    add: Callable[[Tensor, Tensor], Any]
    """Adds the second tensor to the first."""

    squares: Callable[[list[Tensor]], Tensor]
    """The sum of squares of tensors."""


class Grads:
    """The gradients of one bucket; the reduced shard is on the device."""

    def __init__(self, bucket: FlatBucket, rules: GradRules) -> None:
        self.bucket = bucket
        self.rules = rules
        # LOCAL -> RUNNING -> REDUCED, see `_NEXT`.
        self.state = GradState.LOCAL
        # How many reductions are under way.
        self._running = 0

        # -- this rank's own, not reduced yet --
        # In the layout of the bucket; None: there is none.
        self.local: Tensor | None = None
        # Which parameters `local` has.
        self.filled = [False] * len(bucket.params)
        # Indices of the parameters whose gradients have arrived in this backward.
        self.arrived: set[int] = set()
        # How many gradients will arrive in this backward.
        self.awaited = len(bucket.params)

        # -- reduced --
        # This rank's shard; None: nothing was reduced yet.
        self.shard: Tensor | None = None
        # The buffer of which `shard` is a view, if any.
        self.buffer: Tensor | None = None
        # Which parameters any rank had a gradient for since the last step (at the end of backward).
        self.used = [False] * len(bucket.params)
        # The L2 norm of `shard`, where that is not in memory.
        self.norm: Tensor | None = None

    @property
    def is_late(self) -> bool:
        """Whether this rank has gradients that no reduction has taken."""
        return self.local is not None or any(p.grad is not None for p in self.bucket.params)

    # -- states ------------------------------------------------------------------------------------

    def move(self, to: GradState) -> None:
        """Enter state `to`."""
        names = self.bucket.about_gradients
        assert to in _NEXT[self.state], f"{names}: {self.state.value} to {to.value}"
        self.state = to

    def collect(self) -> Shaped[Tensor, " full"]:
        """The buffer for this rank's gradients: those in it are not reduced yet."""
        bucket = self.bucket
        if self.local is None:
            self.local = self.rules.pool.get(bucket.layout.total, self.wide, bucket.full.device)
        # One that comes while the bucket is reduced waits for the next reduction.
        if self.state is not GradState.RUNNING:
            self.move(GradState.LOCAL)
        return self.local

    def launch(self) -> Shaped[Tensor, " full"]:
        """Begin a reduction: the buffer to be reduced; parameters without a gradient are zeros."""
        bucket = self.bucket
        source = self.local
        if source is None:
            source = self.rules.pool.get(bucket.layout.total, self.wide, bucket.full.device)
        for index, filled in enumerate(self.filled):
            if filled:
                self.used[index] = True
            else:
                bucket.view(source, index).zero_()
        source[sum(bucket.layout.sizes) :].zero_()
        self.local = None
        self.filled = [False] * len(bucket.params)
        self.move(GradState.RUNNING)
        self._running += 1
        return source

    def complete(self, out: Shaped[Tensor, " shard"], source: Shaped[Tensor, " full"]) -> None:
        """End a reduction: `out`, of which `source` was the buffer, is added to the shard."""
        inside = out.data_ptr() == self.bucket.own_shard(source).data_ptr()
        self._add(out, source, inside)
        pool = self.rules.pool
        if self.buffer is not source:
            pool.put(source)
        if not inside and self.shard is not out:
            pool.put(out)
        self._running -= 1
        if not self._running:
            self.move(GradState.REDUCED)
            if self.local is not None:
                self.move(GradState.LOCAL)

    def _pooled(self) -> list[Tensor | None]:
        """What the pool gets back when gradients are dropped."""
        return [self.local, self.shard if self.buffer is None else self.buffer]

    def drop(self) -> None:
        """Forget all gradients, and which parameters had one; no reduction is running."""
        for tensor in self._pooled():
            if tensor is not None and self.rules.keeps:
                self.rules.pool.put(tensor)
        self.forget()
        self.filled = [False] * len(self.bucket.params)
        self.used = [False] * len(self.bucket.params)

    def forget(self) -> None:
        """Free what has gradients."""
        self.local = self.shard = self.buffer = self.norm = None
        # Not by `move`: a backward may have failed half-way, with reductions under way.
        self.state = GradState.LOCAL
        self._running = 0

    # -- dtypes ------------------------------------------------------------------------------------

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which gradients accumulate on the device."""
        return choose_dtype(self.bucket.dtype, self.rules.accumulate)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the reduced shard, as it is or would begin."""
        return self.wide

    # -- the reduced shard -------------------------------------------------------------------------

    def _add(self, out: Tensor, source: Tensor, inside: bool) -> None:
        """Add a reduced shard.

        inside: it is a view of `source`.
        """
        rules = self.rules
        if self.shard is not None:
            rules.add(self.shard, out)
        elif out.dtype == self.wide and (not inside or rules.keeps or self.bucket.world == 1):
            # It becomes the shard without a copy. A view would keep all of a large buffer alive.
            self.shard = out
            self.buffer = source if inside else None
        else:
            self.shard = rules.pool.get(out.numel(), self.wide, out.device).copy_(out)

    def begin_shard(self) -> None:
        """Begin the shard with zeros, before anything was reduced."""
        numel = self.bucket.layout.shard_numel
        self.shard = torch.zeros(numel, dtype=self.dtype, device=self.bucket.full.device)

    def views(self) -> list[Tensor]:
        """The shard's range of each parameter."""
        assert self.shard is not None
        return [self.shard[p.within] for p in self.bucket.fragments]

    def tensors(self, *, reduced: bool) -> Iterable[Tensor | None]:
        """The tensors on the device that have gradients: reduced, or not yet."""
        if not reduced:
            return [self.local]
        return [self.shard, self.buffer, *(p.grad for p in self.bucket.params)]

    # -- in a store that frees memory: see `EvictedGrads` ------------------------------------------

    def expect(self) -> None:
        """Start to read the shard, since something will be added to it."""

    def bring(self) -> None:
        """Have the shard in memory."""

    @contextlib.contextmanager
    def in_memory(self) -> Iterator[None]:
        """Inside, the shard is in memory and may be changed."""
        yield

    def wait(self) -> None:
        """Wait for the last copy to the host; any thread may call it."""


class HostGrads(Grads):
    """The reduced shard waits in host memory, where the optimizer's step is done."""

    def __init__(self, bucket: FlatBucket, rules: GradRules, store: StateStore) -> None:
        super().__init__(bucket, rules)
        self.store = store
        # Memory for the shard, kept between steps.
        self.host: Tensor | None = None
        # The last copy to it, which may be running.
        self._copy: Copy | None = None

    @property
    def _sum_dtype(self) -> torch.dtype:
        """The dtype in which gradients are added up on the host."""
        return self.rules.accumulate or self.bucket.masters.dtype

    @property
    def dtype(self) -> torch.dtype:
        """See `Grads.dtype`."""
        return self.shard.dtype if self.shard is not None else self._sum_dtype

    def _add(self, out: Tensor, source: Tensor, inside: bool) -> None:
        """Start to add the device's `out` to the shard on the host."""
        transfers = self.bucket.placement.transfers
        assert transfers is not None
        rules = self.rules
        before = self.shard
        if before is None:
            master = self.bucket.masters.dtype
            dtype = waiting_dtype(out.dtype, master, rules.accumulate, once=rules.once)
            target = self._use_host(dtype)
        else:
            target = before
            self.bring()
            if before.dtype != self._sum_dtype:
                transfers.synchronize()
                target = self._use_host(self._sum_dtype).copy_(before)
        add = before is not None
        self._copy = transfers.to_host(target, out, add=add, then=self._after_copy)

    _after_copy: Callable[[], None] | None = None
    """What the host does when a copy has ended."""

    def _use_host(self, dtype: torch.dtype) -> Tensor:
        """Make `host` the shard, with any values; memory of a wider dtype is reused."""
        if self.host is None or self.host.dtype.itemsize < dtype.itemsize:
            self.host = self.store.buffer(self.bucket.layout.shard_numel, dtype)
        self.shard = self.host
        return self.host

    def begin_shard(self) -> None:
        """See `Grads.begin_shard`."""
        self._use_host(self._sum_dtype).zero_()

    def tensors(self, *, reduced: bool) -> Iterable[Tensor | None]:
        """None is on the device for long."""
        return []

    def _pooled(self) -> list[Tensor | None]:
        return [self.local]  # the shard's memory is `host`

    def forget(self) -> None:
        """See `Grads.forget`."""
        super().forget()
        self._copy = None

    def wait(self) -> None:
        """See `Grads.wait`."""
        if self._copy is not None:
            self._copy.finish()


class EvictedGrads(HostGrads):
    """The reduced shard waits in a store that frees its memory while nothing is added to it."""

    def __init__(self, bucket: FlatBucket, rules: GradRules, store: StateStore) -> None:
        super().__init__(bucket, rules, store)
        self._parts: list[Tensor] = []
        self._after_copy = self._evict

    @property
    def _evicted(self) -> bool:
        return self.shard is not None and is_evicted(self.shard)

    def _use_host(self, dtype: torch.dtype) -> Tensor:
        before = self.host
        if before is not None and before.dtype.itemsize >= dtype.itemsize and is_evicted(before):
            self.store.allocate([before])
        host = super()._use_host(dtype)
        if host is not before:
            # Torch makes no views of evicted memory.
            self._parts = [host[p.within] for p in self.bucket.fragments]
        return host

    def views(self) -> list[Tensor]:
        """See `Grads.views`."""
        return self._parts

    def expect(self) -> None:
        """See `Grads.expect`."""
        if self._evicted:
            self.store.fetch([self.shard])  # type: ignore[list-item]

    def bring(self) -> None:
        """See `Grads.bring`."""
        self.wait()
        self.norm = None
        if self._evicted:
            self.store.fetch([self.shard])  # type: ignore[list-item]
            self.store.wait([self.shard])  # type: ignore[list-item]

    @torch.no_grad()
    def _evict(self) -> None:
        """Evict the shard, which is complete for now."""
        assert self.shard is not None
        # The norm is computed now, so that the shard need not be read again for it.
        self.norm = self.rules.squares([self.shard]).double().sqrt().view(1)
        self.store.evict([self.shard])

    @contextlib.contextmanager
    def in_memory(self) -> Iterator[None]:
        """See `Grads.in_memory`."""
        self.bring()
        yield
        self._evict()

    def forget(self) -> None:
        """See `Grads.forget`."""
        if self.shard is not None and not self._evicted:
            self.store.evict([self.shard], changed=False)
        super().forget()
