"""Offload: which states rest in a store, the copies between device and host, and the step of states that are away.

[Note: copies] Every copy between the device and the host is asked for without waiting, and followed by an event on the
same queue of work. The host touches an end of a copy only after that event: `Transfers.settle`, or the reuse of a
slot. So nothing depends on whether memory is page-locked, which only makes copies truly asynchronous. On a CPU
accelerator the path is the same, and the copies are done when they are asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.errors import UsageError
from ds_core.stores import StateStore, is_evicted, open_store, owns_storage

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ds_core.context import Context
    from ds_core.stepping import Stepper
    from ds_zero.config import ZeroConfig
    from ds_zero.flat import FlatBucket

__all__ = ["ON_DEVICE", "Home", "Offload", "Transfers", "tiled_step"]


@dataclass(frozen=True, slots=True)
class Home:
    """Where a bucket's states rest; None: on the device.

    masters: what the optimizer updates, its states, and reduced gradients (these always stay in memory).
    part: partitioned weights. transfers: the copies between here and there.
    """

    masters: StateStore | None = None
    part: StateStore | None = None
    transfers: Transfers | None = None


ON_DEVICE = Home()


class Offload:
    """What the config offloads. optimizer, param: the stores, None: not offloaded.

    whole: the optimizer is given whole tensors (`ds_zero.owned_tensors`).
    """

    def __init__(self, ctx: Context, section: ZeroConfig, *, whole: bool) -> None:
        wanted = section.offload_optimizer
        self.ratio = wanted.ratio if wanted is not None else 1.0
        self.optimizer = open_store(ctx, wanted.device, wanted.options) if wanted is not None and wanted.on else None
        weights = section.offload_param
        self.param = open_store(ctx, weights.device, weights.options) if weights is not None and weights.on else None
        if self.param is not None and not self.param.resident:
            assert weights is not None
            raise UsageError(
                f"zero_optimization.offload_param.device: {weights.device!r} does not keep states in memory, as the "
                "weights that are gathered must be; use cpu"
            )
        if self.optimizer is not None and not self.optimizer.resident and whole:
            assert wanted is not None
            raise UsageError(
                f"zero_optimization.offload_optimizer.device: {wanted.device!r} does not keep states in memory, which "
                "serves optimizers that look at single elements, as Adam does; with this one use cpu"
            )
        store = self.optimizer or self.param
        self.transfers = Transfers(ctx, store) if store is not None else None
        if self.optimizer is not None and ctx.own_optimizer and ctx.config.core.zero_force_ds_cpu_optimizer:
            raise UsageError(
                "zero_optimization.offload_optimizer moves what the optimizer updates to the host, and initialize was "
                "given an optimizer of your own, which may not be made for that; name one in the config's optimizer "
                'section, or set "zero_force_ds_cpu_optimizer": false'
            )

    def homes(self, params: Sequence[nn.Parameter]) -> Callable[[nn.Parameter], Home]:
        """Where each parameter's states rest; `params` are those of the optimizer, in the model's order.

        With ratio < 1 the last ones are offloaded, whose gradients come first, so that copying them is hidden behind
        the rest of backward; up to half a parameter more or less than `ratio` of all elements.
        """
        if self.transfers is None:
            return lambda param: ON_DEVICE
        stays = Home(None, self.param, self.transfers)
        goes = Home(self.optimizer, self.param, self.transfers)
        trained = [p for p in reversed(params) if p.is_floating_point() or p.is_complex()]
        wanted = self.ratio * sum(p.numel() for p in trained)
        chosen: set[nn.Parameter] = set()
        taken = 0
        for param in trained:
            if taken + param.numel() / 2 > wanted:
                break
            chosen.add(param)
            taken += param.numel()
        return lambda param: goes if param in chosen else stays

    def settle(self) -> None:
        """See `Transfers.settle`."""
        if self.transfers is not None:
            self.transfers.settle()


@dataclass(slots=True)
class _Slot:
    """Host memory that one copy at a time goes through.

    event: that copy; None: over. then: what the host does with what the copy has brought.
    """

    memory: Tensor | None = None
    event: Any = None
    then: Callable[[], Any] | None = None

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the copy and use it."""
        event, self.event = self.event, None
        then, self.then = self.then, None
        if event is not None:
            event.synchronize()
        if then is not None:
            then()


class Transfers:
    """The copies of one partitioner, in order, through two slots in turn. See [Note: copies]."""

    def __init__(self, ctx: Context, store: StateStore) -> None:
        self._new_event, self._store, self._kernels = ctx.accelerator.new_event, store, ctx.kernels
        self._slots: deque[_Slot] = deque([_Slot(), _Slot()])  # the oldest copy's first
        self._direct: deque[Any] = deque()

    def to_host(self, target: Tensor, source: Tensor, *, add: bool) -> None:
        """Start giving host tensor `target` the values of device tensor `source`, or with `add` adding them.

        `source` may be written to by later work of the device. Done after `settle`.
        """
        if not add and source.dtype == target.dtype:
            self._straight(target, source)
            return
        slot, memory = self._next(source)
        memory.copy_(source, non_blocking=True)
        slot.event = self._mark()
        slot.then = (lambda: self._kernels.accumulate(target, memory)) if add else (lambda: target.copy_(memory))

    def to_device(self, target: Tensor, source: Tensor) -> None:
        """Start giving device tensor `target` the values of host tensor `source`, cast on the host.

        Later work of the device sees them; the host may change `source` after `settle`.
        """
        if source.dtype == target.dtype:
            self._straight(target, source)
            return
        slot, memory = self._next(target)
        target.copy_(memory.copy_(source), non_blocking=True)
        slot.event = self._mark()

    def _straight(self, target: Tensor, source: Tensor) -> None:
        """Start a copy that needs no memory in between."""
        target.copy_(source, non_blocking=True)
        while self._direct and self._direct[0].query():
            self._direct.popleft()
        self._direct.append(self._mark())

    def settle(self) -> None:
        """Wait until all is where it was to go."""
        for slot in self._slots:
            slot.finish()
        while self._direct:
            self._direct.popleft().synchronize()

    def _next(self, like: Tensor) -> tuple[_Slot, Tensor]:
        slot = self._slots.popleft()
        self._slots.append(slot)
        slot.finish()
        size = like.numel() * like.element_size()
        if slot.memory is None or slot.memory.numel() < size:
            slot.memory = self._store.buffer(size, torch.uint8)
        return slot, slot.memory[:size].view(like.dtype)

    def _mark(self) -> Any:
        event = self._new_event()
        event.record()
        return event


@torch.no_grad()
def tiled_step(
    optimizer: Optimizer,
    buckets: Sequence[FlatBucket],
    stepper: Stepper,
    grads: Sequence[Tensor | None],
    factor: float,
) -> None:
    """`Stepper.step` where some buckets' states are not in memory: these one after the other.

    grads: of the masters of all buckets, in order. While one bucket is updated the next one is fetched; weights are
    written while their masters are present.
    """
    owners = [b for b in buckets for _ in b.optimized]
    present = [None if b.evictable else g for b, g in zip(owners, grads, strict=True)]
    tiles = [b for b in dict.fromkeys(b for b, g in zip(owners, grads, strict=True) if g is not None) if b.evictable]
    if not tiles or any(g is not None for g in present):
        stepper.step(optimizer, present, factor)
    kept = _settings(optimizer)
    for index, tile in enumerate(tiles):
        store = tile.home.masters
        assert store is not None
        if index == 0:
            store.fetch(_states(tile, optimizer))
        store.wait(_states(tile, optimizer))
        if index + 1 < len(tiles):
            store.fetch(_states(tiles[index + 1], optimizer))
        stepper.step(optimizer, [g if b is tile else None for b, g in zip(owners, grads, strict=True)], factor)
        tile.send()
        if tile.home.transfers is not None:
            tile.home.transfers.settle()
        store.evict(_states(tile, optimizer))
        if _settings(optimizer) != kept:
            raise UsageError(
                f"{type(optimizer).__name__} changes its parameter groups in each step, and states that rest outside "
                "memory are updated in several steps, so it would count them wrongly; use offload_optimizer.device cpu"
            )


def _states(tile: FlatBucket, optimizer: Optimizer) -> list[Tensor]:
    """The masters of a bucket, and what the optimizer keeps of them that is large."""
    found = [tile.master]
    for piece in tile.pieces:
        for value in optimizer.state.get(piece.master, {}).values():
            if isinstance(value, Tensor) and value.shape == piece.master.shape and value.numel():
                if is_evicted(value) or owns_storage(value):
                    found.append(value)
    return found


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
