"""Which states the config offloads to a store, and the copies between device and host.

[Note: copies] Every copy between device and host is started without waiting, and followed by an
event on the same stream. The host uses the memory of a copy only after that event: in
`Transfers.synchronize`, or when a staging buffer is used again. So nothing depends on page-locked
memory, which only makes copies truly asynchronous. On a CPU accelerator the path is the same, and
copies are done when they are started.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from ds_state_stores import StateStore, open_store
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_zero.config import ForceOwnOptimizer, switch

if TYPE_CHECKING:
    from jaxtyping import Shaped
    from torch.optim import Optimizer

    from ds_core.context import Context
    from ds_zero.config import ZeroConfig


@dataclass(frozen=True, slots=True)
class StatePlacement:
    """Where a bucket's states are; None: on the device.

    `choose_masters` and `place_weights` make the bucket's policies from it.
    """

    masters: StateStore | None = None
    """The store of masters, optimizer states and reduced gradients."""

    shards: StateStore | None = None
    """The store of weights, where they are sharded."""

    transfers: Transfers | None = None
    """The copies between device and host."""

    deferred: bool = False
    """Whether `ds_zero.zenflow` updates masters and weights, at times of its own."""


ON_DEVICE = StatePlacement()
_NONE: Mapping[nn.Parameter, int] = {}


def collects(optimizer: Optimizer) -> bool:
    """Whether its step communicates, so that it must be one step for all parameters."""
    return hasattr(optimizer, "bind_layout")


def not_evicted(section: ZeroConfig) -> UsageError:
    """What to raise of an optimizer that cannot update one tile after the other."""
    wanted = section.offload_optimizer
    assert wanted is not None
    return UsageError(
        f"zero_optimization.offload_optimizer.device: {wanted.device!r} does not keep states in "
        "memory, which works with element-wise optimizers only, such as Adam; use cpu with this one"
    )


class OffloadStores:
    """The stores of the config's offload sections.

    full_tensors: whether the optimizer gets full tensors, see `ds_zero.buckets.full_tensors`.
    """

    optimizer: StateStore | None = None
    """The store of masters and optimizer states; None: not offloaded."""

    param: StateStore | None = None
    """The store of sharded weights; None: not offloaded."""

    def __init__(self, ctx: Context, section: ZeroConfig, *, full_tensors: bool) -> None:
        wanted = section.offload_optimizer
        # The share of elements whose states are offloaded.
        self.ratio = wanted.ratio if wanted is not None else 1.0
        if wanted is not None and wanted.on:
            self.optimizer = open_store(ctx, wanted.device, wanted.options)
        weights = section.weights_offload
        if weights is not None and weights.on:
            # The share that stays in memory is kept by a store of its own.
            self.param = open_store(ctx, weights.device, {**weights.options, "max_in_cpu": 0})
        self._in_memory = self.param
        self._in_memory_elements = 0
        if self.param is not None and not self.param.resident:
            assert weights is not None
            self._in_memory = open_store(ctx, "cpu", {"pin_memory": weights.pin_memory})
            self._in_memory_elements = weights.max_in_cpu
        # A tile's step updates ranges of parameters, one bucket after the other.
        if self.optimizer is not None and not self.optimizer.resident and full_tensors:
            raise not_evicted(section)
        self.deferred = section.zenflow is not None
        self._close = weakref.finalize(
            self, _close, [s for s in (self.optimizer, self.param) if s is not None]
        )
        store = self.optimizer or self.param
        self.transfers = Transfers(ctx, store) if store is not None else None
        refused = ctx.own_optimizer and switch(ctx.config, ForceOwnOptimizer, True)
        if self.optimizer is not None and refused:
            raise UsageError(
                "zero_optimization.offload_optimizer moves what the optimizer updates to the host, "
                "and initialize was given an optimizer object, which may not support that; name "
                "one in the config's optimizer section, or set "
                '"zero_force_ds_cpu_optimizer": false'
            )

    def placements(
        self, params: Sequence[nn.Parameter], shards: Mapping[nn.Parameter, int] = _NONE
    ) -> Callable[[nn.Parameter], StatePlacement]:
        """The placement of each parameter's states.

        params: those of the optimizer, in the model's order.
        shards: the elements of this rank's shard of each parameter that is sharded, in the model's
            order.
        """
        if self.transfers is None:
            return lambda param: ON_DEVICE
        # The first weights stay in host memory: a pass begins with them, so that nothing runs
        # while they would be read.
        sums = itertools.accumulate(shards.values())
        kept = {p for p, upto in zip(shards, sums, strict=True) if upto <= self._in_memory_elements}
        # With ratio < 1 the last parameters are offloaded: their gradients come first, so that
        # copying them overlaps with the rest of backward. Half a parameter more or less than asked.
        trained = [p for p in reversed(params) if p.is_floating_point() or p.is_complex()]
        wanted = self.ratio * sum(p.numel() for p in trained)
        chosen: set[nn.Parameter] = set()
        taken = 0
        for param in trained:
            if taken + param.numel() / 2 > wanted:
                break
            chosen.add(param)
            taken += param.numel()

        def place(param: nn.Parameter) -> StatePlacement:
            masters = self.optimizer if param in chosen else None
            shards = self._in_memory if param in kept else self.param
            deferred = self.deferred and param in chosen
            return StatePlacement(masters, shards, self.transfers, deferred)

        return place

    def close(self) -> None:
        """Close the stores; also called at exit."""
        self._close()

    def synchronize(self) -> None:
        """See `Transfers.synchronize`."""
        if self.transfers is not None:
            self.transfers.synchronize()


def _close(stores: Sequence[StateStore]) -> None:
    for store in stores:
        store.close()


class Copy:
    """One copy between device and host.

    then: what the host does with the data after it.
    """

    def __init__(self, event: Any, then: Callable[[], Any] | None = None) -> None:
        self._event = event
        self._then = then
        self._lock = threading.Lock()

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the copy, and use its data, unless that was done. Any thread may call it."""
        with self._lock:
            event, self._event = self._event, None
            then, self._then = self._then, None
            if event is not None:
                event.synchronize()
            if then is not None:
                then()

    @property
    def over(self) -> bool:
        """Whether `finish` would not wait."""
        event = self._event
        return event is None or event.query()


@dataclass(slots=True)
class _StagingBuffer:
    """Host memory through which one copy at a time goes: the last one, which may be running."""

    memory: Tensor | None = None
    copy: Copy = field(default_factory=lambda: Copy(None))


class Transfers:
    """The copies of one partitioner, in order, through two staging buffers in turn.

    See [Note: copies].
    """

    def __init__(self, ctx: Context, store: StateStore) -> None:
        self._new_event = ctx.accelerator.new_event
        # Makes the staging buffers, page-locked where the config asks for that.
        self._store = store
        self._kernels = ctx.kernels
        # The oldest copy's first. Two: the host uses one while the device fills the other.
        self._slots: deque[_StagingBuffer] = deque([_StagingBuffer(), _StagingBuffer()])
        # Copies without a staging buffer, in order.
        self._direct: deque[Copy] = deque()

    def to_host(
        self,
        target: Shaped[Tensor, " shard"],
        source: Shaped[Tensor, " shard"],
        *,
        add: bool,
        then: Callable[[], Any] | None = None,
    ) -> Copy:
        """Start to copy device tensor `source` into host tensor `target`, or with `add` to add it.

        `source` may be overwritten by later work of the device. Complete after `synchronize`, or
        the copy's `finish`.
        """
        # Adding and casting is the host's work, after the copy.
        if not add and source.dtype == target.dtype:
            return self._straight(target, source, then)
        slot, memory = self._next(source)
        memory.copy_(source, non_blocking=True)

        def use() -> None:
            if add:
                self._kernels.accumulate(target, memory)
            else:
                target.copy_(memory)
            if then is not None:
                then()

        slot.copy = Copy(self._mark(), use)
        return slot.copy

    def to_device(
        self,
        target: Shaped[Tensor, " shard"],
        source: Shaped[Tensor, " shard"],
        then: Callable[[], Any] | None = None,
    ) -> None:
        """Start to copy host tensor `source` into device tensor `target`; casts are done on the
        host.

        Later work of the device sees the values; the host may change `source` after `synchronize`,
        or when `then` is called.
        """
        if source.dtype == target.dtype:
            self._straight(target, source, then)
            return
        slot, memory = self._next(target)
        target.copy_(memory.copy_(source), non_blocking=True)
        slot.copy = Copy(self._mark())
        if then is not None:
            then()

    def _straight(
        self, target: Tensor, source: Tensor, then: Callable[[], Any] | None = None
    ) -> Copy:
        """Start a copy that needs no staging buffer."""
        target.copy_(source, non_blocking=True)
        copy = Copy(self._mark(), then)
        self._direct.append(copy)
        # What is done after a copy must not wait for the next `synchronize`: it frees memory.
        while self._direct and self._direct[0].over:
            self._direct.popleft().finish()
        return copy

    def synchronize(self) -> None:
        """Wait until all copies are over."""
        for slot in self._slots:
            slot.copy.finish()
        while self._direct:
            self._direct.popleft().finish()

    def _next(self, like: Tensor) -> tuple[_StagingBuffer, Tensor]:
        slot = self._slots.popleft()
        self._slots.append(slot)
        slot.copy.finish()
        size = like.numel() * like.element_size()
        if slot.memory is None or slot.memory.numel() < size:
            slot.memory = self._store.buffer(size, torch.uint8)
        return slot, slot.memory[:size].view(like.dtype)

    def _mark(self) -> Any:
        event = self._new_event()
        event.record()
        return event
