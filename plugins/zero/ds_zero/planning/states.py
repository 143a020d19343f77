"""Masters, optimizer states and gradients of one rank, on the device and on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from ds_plan import Kinds, Offload, PlannedRun

from ds_zero.planning.buckets import SimulatedBucket
from ds_zero.planning.disk import Resting
from ds_zero.planning.dtypes import Dtypes


@dataclass(frozen=True, slots=True)
class RankStates:
    """What one rank keeps of buckets besides weights."""

    run: PlannedRun

    offload: Offload

    dtypes: Dtypes

    rank: int
    """Among those over which states are sharded."""

    def optimized(self, buckets: Iterable[SimulatedBucket]) -> Kinds:
        """Masters, the optimizer's states, and gradients in the masters' dtype."""
        masters = states = cast = 0
        for bucket in buckets:
            size = bucket.layout.shard_numel
            own = self.dtypes.master(bucket)
            if self.copies_masters(bucket) or own != bucket.dtype:
                masters += size * own.itemsize
            # The optimizer has no state for padding.
            states += bucket.owned(self.rank) * self.run.kept(own)
            on_device = self.offload is Offload.NONE
            grad = self.dtypes.grad(bucket) if on_device else self.host_grad(bucket)
            if self.run.casts and grad != own:
                cast += size * own.itemsize
        return Kinds(masters=masters, states=states, cast=cast)

    def copies_masters(self, bucket: SimulatedBucket) -> bool:
        """Whether masters are copies even in the weights' dtype.

        On the host they are, except of weights that are kept there too.
        """
        if self.offload is Offload.ALL:
            return bucket.replicated
        return self.offload is not Offload.NONE

    def host_grad(self, bucket: SimulatedBucket) -> torch.dtype:
        """The dtype of gradients on the host: the masters', in which they are summed, or, where
        there is nothing to sum, that of the reduction.
        """
        accumulate = self.run.precision.accumulate
        if accumulate is not None:
            return accumulate
        return self.dtypes.reduced(bucket) if self.run.gas == 1 else self.dtypes.master(bucket)

    def gradients_on_host(self, buckets: Iterable[SimulatedBucket]) -> int:
        """Bytes of reduced gradients."""
        return sum(b.layout.shard_numel * self.host_grad(b).itemsize for b in buckets)

    def is_staged(self, bucket: SimulatedBucket) -> bool:
        """Whether a step on the host leaves 16-bit weights there, to be copied to the device."""
        on_device = not self.offload.weights or bucket.replicated
        return self.dtypes.master(bucket) != bucket.dtype and on_device

    def staged(self, buckets: Iterable[SimulatedBucket]) -> int:
        """Bytes of those weights."""
        return sum(bucket.shard_bytes for bucket in buckets if self.is_staged(bucket))

    def copy_buffers(self, buckets: Iterable[SimulatedBucket]) -> int:
        """Bytes of the two staging buffers for copies between device and host, see
        `ds_zero.offload.placement`.
        """
        sizes = (
            b.layout.shard_numel * max(self.dtypes.reduced(b).itemsize, b.dtype.itemsize)
            for b in buckets
        )
        return 2 * max(sizes, default=0)

    def saved(self, bucket: SimulatedBucket) -> int:
        """Bytes in which a bucket that is updated before the step is saved, see
        `ds_zero.offload.super_offload`.
        """
        own = self.dtypes.master(bucket)
        # Weights on the host that are their own masters are updated in the step alone.
        if self.offload is Offload.ALL and not bucket.replicated and own == bucket.dtype:
            return 0
        # 16-bit weights on the host are written to memory of their own until the step.
        written = own != bucket.dtype and not self.is_staged(bucket)
        itemsize = own.itemsize + self.run.kept(own) + (bucket.dtype.itemsize if written else 0)
        return bucket.layout.shard_numel * itemsize

    def on_disk(self, bucket: SimulatedBucket) -> Resting:
        """What a store that frees memory has of a bucket."""
        trained = [bucket] if bucket.trained else []
        optimized = self.optimized(trained)
        weights = self.offload.weights and not bucket.replicated
        return Resting(
            masters=optimized.masters,
            states=optimized.states,
            gradients=self.gradients_on_host(trained),
            weights=bucket.shard_bytes if weights else 0,
            shard=bucket.layout.shard_numel,
            kept=self.run.states,
        )
