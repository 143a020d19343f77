"""What one rank keeps of its buckets, and where, as the classes of training answer it.

The classes are chosen by the functions that training calls (`ds_zero.buckets.weights.weights_kind`,
`ds_zero.buckets.choose.masters_kind`), and say where their memory is and how much they take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce

import torch
from ds_plan import Kinds, Offload, PlannedRun
from torch import nn

from ds_core.precision import Precision, wire_dtypes
from ds_zero.buckets.choose import masters_kind
from ds_zero.buckets.sizes import Bytes, Place, Sizes, choose_dtype, waiting_dtype
from ds_zero.buckets.weights import Weights, weights_kind
from ds_zero.gather.scheduler import narrower_dtype
from ds_zero.planning.buckets import SimulatedBucket


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The dtypes under one precision."""

    precision: Precision

    autocast: Mapping[nn.Parameter, torch.dtype]
    """Parameters that are used, and whose gradients are sent, in the dtype of autocast."""

    @classmethod
    def of(cls, module: nn.Module, precision: Precision) -> Dtypes:
        """Those of the parameters of `module`."""
        if not precision.autocast:
            return cls(precision, {})
        return cls(precision, wire_dtypes(module, precision.autocast, precision.autocast_modules))

    def master(self, bucket: SimulatedBucket) -> torch.dtype:
        """Of what the optimizer updates."""
        return choose_dtype(bucket.dtype, self.precision.master)

    def grad(self, bucket: SimulatedBucket) -> torch.dtype:
        """In which gradients accumulate on the device."""
        return choose_dtype(bucket.dtype, self.precision.accumulate)

    def reduced(self, bucket: SimulatedBucket) -> torch.dtype:
        """In which gradients are sent: the widest that any parameter asks for, as in `Reducer`."""
        wanted = [self.autocast.get(p) or self.precision.wire or p.dtype for p in bucket.params]
        return reduce(torch.promote_types, wanted)

    def gathered(self, bucket: SimulatedBucket) -> torch.dtype:
        """In which weights are gathered."""
        return narrower_dtype(bucket.params, bucket.dtype, self.autocast) or bucket.dtype


@dataclass(frozen=True, slots=True)
class RankStates:
    """What one rank keeps of buckets."""

    run: PlannedRun

    offload: Offload

    dtypes: Dtypes

    rank: int
    """Among those over which states are sharded."""

    deferred: bool
    """Whether ZenFlow updates masters, so that reduced gradients stay on the device until the step."""

    _masters: dict[SimulatedBucket, Bytes] = field(default_factory=dict, init=False, repr=False)
    """What `masters` has found: it is asked for often, and adds up the parameters of a bucket."""

    def weights(self, bucket: SimulatedBucket) -> type[Weights]:
        """The class of its weights."""
        resident = not self.offload.on_disk if self.offload.weights else None
        return weights_kind(sharded=not bucket.replicated, resident=resident)

    def masters(self, bucket: SimulatedBucket) -> Bytes:
        """The masters, states and waiting gradients of a trained bucket, and where they are."""
        if bucket not in self._masters:
            kind = masters_kind(
                self.weights(bucket),
                same=self.dtypes.master(bucket) == bucket.dtype,
                resident=None if self.offload is Offload.NONE else not self.offload.on_disk,
                deferred=self.deferred,
            )
            self._masters[bucket] = kind.memory(self.sizes(bucket))
        return self._masters[bucket]

    def sizes(self, bucket: SimulatedBucket) -> Sizes:
        """What the classes are asked with."""
        master = self.dtypes.master(bucket)
        if self.offload is Offload.NONE:
            gradient = self.dtypes.grad(bucket)
        else:
            gradient = waiting_dtype(
                self.dtypes.reduced(bucket),
                master,
                self.run.precision.accumulate,
                once=self.run.gas == 1,
            )
        return Sizes(
            total=bucket.layout.total,
            shard=bucket.layout.shard_numel,
            own=bucket.owned(self.rank),
            weight=bucket.dtype,
            master=master,
            gradient=gradient,
            state_bytes=self.run.kept(master),
            weights=self.weights(bucket).place,
        )

    def kept(self, trained: Iterable[SimulatedBucket], place: Place) -> Kinds:
        """What is at `place` besides weights."""
        found = [f for f in map(self.masters, trained) if f.place is place]
        return Kinds(
            masters=sum(f.masters for f in found),
            states=sum(f.states for f in found),
            gradients=sum(f.gradients for f in found),
            cast=sum(f.cast for f in found) if self.run.casts else 0,
        )

    def copy_buffers(self, trained: Iterable[SimulatedBucket]) -> int:
        """Bytes of the two staging buffers for copies between device and host, see
        `ds_zero.offload.placement`.
        """
        sizes = (
            b.layout.shard_numel * max(self.dtypes.reduced(b).itemsize, b.dtype.itemsize)
            for b in trained
        )
        return 2 * max(sizes, default=0)

    def saved(self, bucket: SimulatedBucket) -> int:
        """Bytes in which a bucket that is updated before the step is saved, see
        `ds_zero.offload.super_offload`.
        """
        found = self.masters(bucket)
        # Weights on the host that are their own masters are updated in the step alone.
        if not found.masters:
            return 0
        sizes = self.sizes(bucket)
        # 16-bit weights on the host are written to memory of their own until the step.
        written = 0 if found.staged else sizes.narrow_bytes
        return found.masters + sizes.shard * sizes.state_bytes + written
