"""What the optimizer updates of a bucket, and where it is kept: one class per resting place.

`Masters` is the contract. To add a resting place, write a class and choose it in
`ds_zero.buckets.choose`; nothing else asks where masters are. `ds_zero.buckets.evicted` has the
class for stores that free memory, `ds_zero.buckets.full_tensors` that for optimizers that need full
tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.states import set_optimizer_state
from ds_state_stores import StateStore
from torch import Tensor, nn

from ds_zero.buckets.records import Fragment
from ds_zero.buckets.sizes import Bytes, Place, Sizes
from ds_zero.reduce.bucket_grads import Grads, HostGrads

if TYPE_CHECKING:
    from ds_run_state.states import StateTensor
    from jaxtyping import Shaped
    from torch.optim import Optimizer

    from ds_zero.buckets.flat import FlatBucket
    from ds_zero.buckets.records import DeferredUpdates
    from ds_zero.reduce.bucket_grads import GradRules


class Masters:
    """Masters that are this rank's shard of the weights itself.

    This is the whole story for fp32 training, and for a bucket that no optimizer updates.
    """

    copied = False
    """Whether masters have memory of their own, so that weights are made from them."""

    full_tensors = False
    """Whether fragments are full parameters in their shapes, not ranges of flattened ones."""

    place: Place | None = None
    """Where masters and optimizer states are between steps; None: where the shard is."""

    evicts: StateStore | None = None
    """The store that frees the memory of masters and optimizer states; None: always in memory."""

    fragments: list[Fragment]
    """One per parameter, whose `master` is what this rank's optimizer updates."""

    def __init__(
        self, bucket: FlatBucket, flat: Shaped[Tensor, " shard"], store: StateStore | None
    ) -> None:
        self.bucket = bucket
        # All masters of this rank, one after the other in the layout of the shard.
        self.flat = flat
        # Where the host keeps reduced gradients, and masters unless they are on the shard.
        self.store = store
        self.fragments = [self._fragment(i) for i in range(len(bucket.params))]

    def _fragment(self, index: int) -> Fragment:
        bucket = self.bucket
        span = bucket.layout.span(index, bucket.rank)
        param = bucket.params[index]
        master = nn.Parameter(self.flat[span.within], requires_grad=param.requires_grad)
        return Fragment(bucket.names[index], param, bucket.shapes[index], index, *span, master)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the optimizer updates."""
        return self.flat.dtype

    @property
    def differ(self) -> bool:
        """Whether masters have another dtype than the weights."""
        return self.dtype != self.bucket.dtype

    @property
    def movable(self) -> list[Fragment]:
        """The fragments whose masters and states `offload_states` may move: no store has them."""
        return self.fragments

    @classmethod
    def memory(cls, sizes: Sizes) -> Bytes:
        """The memory that a bucket of these `sizes` takes; what `dscore plan` adds up."""
        place = sizes.weights if cls.place is None else cls.place
        # On the device reduced gradients are in the reducer's buffers.
        waits = place is not Place.DEVICE
        full = sizes.shard * sizes.master.itemsize
        return Bytes(
            place,
            masters=full if cls.copied else 0,
            states=sizes.own * sizes.state_bytes,
            gradients=sizes.shard * sizes.gradient.itemsize if waits else 0,
            cast=full if sizes.gradient != sizes.master else 0,
        )

    def rest(self) -> None:
        """Free what need not be in memory between steps; called once, when masters were made."""

    def in_memory(self) -> contextlib.AbstractContextManager[None]:
        """Inside, masters are in memory and may be changed."""
        return self.bucket.weights.in_memory(write=True)

    def refresh(self) -> None:
        """Make masters from the weights. Collective where the optimizer updates full tensors."""

    @torch.no_grad()
    def write(self, index: int, weight: Shaped[Tensor, ...]) -> None:
        """Make the full `weight` of parameter `index`, equal on all ranks, its master."""
        fragment = self.fragments[index]
        with self.in_memory():
            fragment.master.data.view(-1).copy_(weight.reshape(-1)[fragment.start : fragment.stop])
        self.written(fragment)

    @torch.no_grad()
    def refresh_one(self, index: int, weight: Shaped[Tensor, ...]) -> None:
        """After a replicated `weight` may have been written: update its master where they differ.

        A master that is the weight but for rounding keeps its bits.
        """
        fragment = self.fragments[index]
        with self.in_memory():
            master = fragment.master.data.view(-1)
            now = weight.reshape(-1)[fragment.start : fragment.stop].to(master.device)
            master.copy_(torch.where(master.to(now.dtype) == now, master, now))
        self.written(fragment)

    # -- the step ----------------------------------------------------------------------------------

    @property
    def staged(self) -> Shaped[Tensor, " shard"] | None:
        """Where a step writes this rank's shard in the weights' dtype; None: `write_back` casts."""
        return None

    def targets(self) -> list[Tensor | None]:
        """For each of `fragments`, where a step writes its value in the weights' dtype."""
        staged = self.staged
        if staged is None:
            return [None] * len(self.fragments)
        weights = self.bucket.weights
        parts = (
            weights.parts if staged is weights.shard else [staged[p.within] for p in self.fragments]
        )
        return [part if p.numel else None for part, p in zip(parts, self.fragments, strict=True)]

    def write_back(self, unused: Iterable[Fragment]) -> None:
        """After a step, which has written `targets`: write the remaining new weights.

        unused: the fragments that the step has left as they were. Masters are in memory. The copies
        to the device end with `Transfers.synchronize`.
        """

    def publish(self, unused: Iterable[Fragment]) -> None:
        """`write_back` when the step is over, unless this was done in the step."""
        self.write_back(unused)

    # -- gradients and states ----------------------------------------------------------------------

    def new_grads(self, rules: GradRules) -> Grads:
        """The gradients of the bucket: reduced ones are kept where the optimizer reads them."""
        if self.store is None:
            return Grads(self.bucket, rules)
        return HostGrads(self.bucket, rules, self.store)

    def gradients(self, grads: Grads) -> list[Tensor | None]:
        """For each of `fragments`, its reduced gradient; None: no rank had one, or no element."""
        if grads.shard is None:
            return [None] * len(self.fragments)
        used = (grads.used[p.index] and p.numel for p in self.fragments)
        return [part if u else None for part, u in zip(grads.views(), used, strict=True)]

    def ranges(self, index: int) -> list[tuple[int, int]]:
        """The range of parameter `index` that each rank of the bucket updates."""
        spans = (self.bucket.layout.span(index, rank) for rank in range(self.bucket.world))
        return [(s.start, s.stop) for s in spans]

    def set_state(
        self, optimizer: Optimizer, fragment: Fragment, values: Mapping[str, Any]
    ) -> None:
        """Replace the optimizer's state of `fragment`."""
        set_optimizer_state(optimizer, fragment.master, dict(values))

    def written(self, fragment: Fragment) -> None:
        """The master of `fragment`, or an optimizer state of it, was written by somebody else."""

    def saved(self, fragment: Fragment, store: bool) -> Iterator[StateTensor]:
        """What checkpoints keep of `fragment` beside its weight and its optimizer states."""
        return iter(())


class DeviceCopy(Masters):
    """Masters with memory of their own on the device, in any dtype."""

    copied = True
    place = Place.DEVICE

    _writes_evicted = False
    """Whether a step brings an evicted shard into memory, so that it can write there."""

    def __init__(
        self, bucket: FlatBucket, flat: Shaped[Tensor, " shard"], store: StateStore | None = None
    ) -> None:
        super().__init__(bucket, flat, store)
        self._staged: Tensor | None = None

    def in_memory(self) -> contextlib.AbstractContextManager[None]:
        """See `Masters.in_memory`."""
        return contextlib.nullcontext()

    @torch.no_grad()
    def refresh(self) -> None:
        """See `Masters.refresh`."""
        weights = self.bucket.weights
        with weights.in_memory():
            self.flat.copy_(weights.shard)

    @property
    def staged(self) -> Shaped[Tensor, " shard"] | None:
        """See `Masters.staged`: the shard, or host memory that is copied to the device."""
        weights = self.bucket.weights
        if not self.differ or (weights.evicts is not None and not self._writes_evicted):
            return None
        if _together(weights.shard, self.flat):
            return weights.shard
        if self._staged is None and self.store is not None:
            self._staged = self.store.buffer(self.bucket.layout.shard_numel, self.bucket.dtype)
        return self._staged

    @torch.no_grad()
    def write_back(self, unused: Iterable[Fragment]) -> None:
        """See `Masters.write_back`."""
        staged = self.staged
        if staged is self.bucket.weights.shard:
            return
        if staged is not None:
            # The buffer is new, or has the values of an earlier step.
            for fragment in unused:
                staged[fragment.within].copy_(fragment.master)
        self.bucket.weights.write(self.flat if staged is None else staged)


class InStore(DeviceCopy):
    """Masters in host memory, in a store that keeps them there: the host does the step."""

    place = Place.HOST

    @property
    def movable(self) -> list[Fragment]:
        """See `Masters.movable`."""
        return []

    @classmethod
    def memory(cls, sizes: Sizes) -> Bytes:
        """See `Masters.memory`: also new weights that are copied to the device."""
        # A step writes into weights that are on the host themselves.
        to_device = sizes.weights is Place.DEVICE
        return replace(super().memory(sizes), staged=sizes.narrow_bytes if to_device else 0)


class Deferred(InStore):
    """Masters in host memory that somebody updates at times of its own, weights as well.

    Reduced gradients stay on the device until the step: see `ds_zero.zenflow`.
    """

    updates: DeferredUpdates | None = None
    """Who updates them; None before it is there, and when it has ended."""

    @classmethod
    def memory(cls, sizes: Sizes) -> Bytes:
        """See `Masters.memory`: without gradients, of which `updates` has sums in their dtype."""
        # Weights keep their values until `updates` writes them, so new ones are made beside them,
        # also on the host.
        return replace(super().memory(sizes), gradients=0, cast=0, staged=sizes.narrow_bytes)

    def publish(self, unused: Iterable[Fragment]) -> None:
        """Nothing: `updates` writes weights."""

    def new_grads(self, rules: GradRules) -> Grads:
        """See `Masters.new_grads`."""
        return Grads(self.bucket, rules)

    def written(self, fragment: Fragment) -> None:
        """See `Masters.written`."""
        if self.updates is not None:
            self.updates.follow(fragment)

    def saved(self, fragment: Fragment, store: bool) -> Iterator[StateTensor]:
        """See `Masters.saved`."""
        return iter(()) if self.updates is None else self.updates.saved(fragment, store)


def _together(shard: Tensor, master: Tensor) -> bool:
    """Whether the step that updates the master can write the shard."""
    return shard.device == master.device
