"""What one rank sends in a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from ds_core.errors import UsageError
from ds_zero.buckets.sizes import Place
from ds_zero.comm.quantised import GRADIENT_BITS, WEIGHT_BITS, Message, can_quantise
from ds_zero.config import ZeroConfig
from ds_zero.planning.buckets import Laid, SimulatedBucket, SimulatedUnit
from ds_zero.planning.states import RankStates


@dataclass(frozen=True, slots=True)
class Blocks:
    """The ranks over which states are sharded, and the blocks that they form."""

    sharded: int
    """Ranks over which states are sharded: with MiCS those of a block."""

    size: int
    """Ranks of a block; all, without blocks."""

    second: bool = False
    """Whether a block keeps a second copy of the weights (hpZ)."""

    @classmethod
    def of(cls, section: ZeroConfig, world: int) -> Blocks:
        """Those of a config. Raises UsageError where `world` ranks do not divide into blocks."""
        hpz = section.zero_hpz_partition_size
        mics = section.mics_shard_size
        if section.stage != 3 or (hpz < 2 and mics < 1):
            return cls(world, world)
        key, size = ("zero_hpz_partition_size", hpz) if hpz > 1 else ("mics_shard_size", mics)
        if world % size:
            raise UsageError(
                f"zero_optimization.{key}: {size} does not divide {world} data-parallel ranks"
            )
        return cls(world, size, second=size < world) if hpz > 1 else cls(size, size)


@dataclass(slots=True)
class Traffic:
    """Counts what a rank sends per step. Elements and bytes are those of `ds_plan.Need`.

    A rank sends its shard of each message to all others, so some of it to other blocks.
    """

    section: ZeroConfig
    blocks: Blocks
    states: RankStates

    # -- The sums.

    reduced: int = field(default=0, init=False)
    """Elements of gradients."""

    gathered: int = field(default=0, init=False)
    """Elements of weights."""

    sent: int = field(default=0, init=False)
    """Bytes of both."""

    link: int = field(default=0, init=False)
    """Bytes between device and host."""

    across: int = field(default=0, init=False)
    """Bytes of `sent` to other blocks."""

    @property
    def others(self) -> int:
        """Ranks with which this one shares the states."""
        return self.blocks.sharded - 1

    @property
    def outside(self) -> int:
        """Those of them that are in other blocks."""
        return self.blocks.sharded - self.blocks.size

    def count(self, laid: Laid) -> None:
        """Add a step's messages for each bucket and unit."""
        for bucket in laid.trained:
            self._count_reduction(bucket)
            if bucket.replicated:
                self._count_update(bucket)
            if self.states.masters(bucket).place is not Place.DEVICE:
                self._count_copies(bucket)
        for unit in laid.units:
            self._count_gathers(unit)
        if self.blocks.size == self.states.run.world:
            self.across = 0

    @property
    def reductions(self) -> int:
        """Reductions of a bucket per step: stage 1 accumulates locally, later stages reduce each
        micro-batch.
        """
        return self.states.run.gas if self.section.stage > 1 else 1

    def _count_reduction(self, bucket: SimulatedBucket) -> None:
        """Gradients to the ranks that own them."""
        section = self.section
        shard = bucket.layout.shard_numel
        itemsize = self.states.dtypes.reduced(bucket).itemsize
        times = self.reductions
        world = self.states.run.world
        # MiCS: the reduced shards are summed over the blocks, by an all-reduce.
        summed = times * shard * 2 * (world - self.blocks.sharded) // world
        # An all-reduce sends everything twice.
        by_all_reduce = not section.reduce_scatter and section.use_multi_rank_bucket_allreduce
        messages = times * (2 if by_all_reduce else 1)
        self.reduced += shard * self.others * messages + summed
        message = shard * messages * itemsize
        receivers = self.outside
        if (
            section.zero_quantized_gradients
            and not bucket.replicated
            and can_quantise(bucket.dtype)
        ):
            # Between blocks each crosses once per block, not once per rank: see
            # `ds_zero.comm.quantised`.
            message = Message.of(GRADIENT_BITS, shard).size * times
            receivers = self.blocks.sharded // self.blocks.size - 1
        self.sent += message * self.others + summed * itemsize
        self.across += message * receivers + summed * itemsize

    def _count_update(self, bucket: SimulatedBucket) -> None:
        """Updated weights, to the ranks that keep all of them."""
        shard = bucket.layout.shard_numel
        self.gathered += shard * self.others
        self.sent += bucket.shard_bytes * self.others
        self.across += bucket.shard_bytes * self.outside

    def _count_copies(self, bucket: SimulatedBucket) -> None:
        """Between device and host: gradients down, and weights up that the device keeps."""
        zenflow = self.section.zenflow
        # ZenFlow copies gradients in the step, others after each reduction.
        times = self.reductions if zenflow is None else 1
        self.link += bucket.layout.shard_numel * times * self.states.dtypes.reduced(bucket).itemsize
        if self.states.weights(bucket).place is Place.DEVICE:
            every = 1 if zenflow is None else zenflow.update_interval
            # The pace of "auto" is not known before the run.
            self.link += bucket.shard_bytes // (every if isinstance(every, int) else 1)

    def _count_gathers(self, unit: SimulatedUnit) -> None:
        """Weights of stage 3, to the ranks that compute with them."""
        section = self.section
        bucket = unit.bucket
        shard = bucket.layout.shard_numel
        itemsize = self.states.dtypes.gathered(bucket).itemsize
        factor = 2 if section.use_all_reduce_for_fetch_params else 1
        count = unit.gathers * self.states.run.gas
        # hpZ: all gathers stay inside of the block but the first one after a step, which made the
        # second copies stale.
        inner = count - bucket.trained if self.blocks.second and count else 0
        outer = count - inner
        inside = bucket.layout.total // self.blocks.size * (self.blocks.size - 1) * inner
        self.gathered += shard * outer * factor * self.others + inside
        message = shard * factor * itemsize
        quantised = section.zero_quantized_weights or (
            section.zero_quantized_nontrainable_weights and not bucket.trained
        )
        if quantised and can_quantise(bucket.dtype):
            message = Message.of(WEIGHT_BITS, shard).size
            # Second copies are decoded.
            itemsize = bucket.dtype.itemsize
        self.sent += message * outer * self.others + inside * itemsize
        self.across += message * outer * self.outside
        if self.states.weights(bucket).place is not Place.DEVICE:
            self.link += bucket.shard_bytes * outer
