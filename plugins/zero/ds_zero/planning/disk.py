"""What a rank holds in memory and on disk where a store frees memory.

See `ds_zero.offload.tiled_step` and `ds_zero.offload.away`.

Stores keep their buffers, so what is at most under way counts for the whole run: the bucket that a
step updates, with those that are read and written beside it, and the weights that are read ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_zero.config import OffloadOptimizer, OffloadParam, ZeroConfig


@dataclass(frozen=True, slots=True)
class Resting:
    """Bytes of one bucket's states on this rank."""

    masters: int

    states: int

    gradients: int

    weights: int
    """0 where they are not kept on disk."""

    shard: int
    """Its elements."""

    kept: int = 2
    """The number of the optimizer's states per parameter."""

    @property
    def tensors(self) -> list[int]:
        """What a step writes, without weights: the masters, and each of the `kept` states."""
        return [self.masters, *([self.states // self.kept] * self.kept if self.kept else [])]

    @property
    def tile(self) -> int:
        """What a step brings into memory, without weights."""
        return self.masters + self.states + self.gradients


@dataclass(frozen=True, slots=True)
class Rest:
    """What one rank's states on disk take, in bytes."""

    weights_in_memory: int
    """Weights that ``offload_param.max_in_cpu`` keeps in memory."""

    state_buffers: int
    """Memory through which states go."""

    weight_buffers: int
    """Memory through which weights go."""

    disk: int
    """What is on disk."""


def rest_on_disk(buckets: Sequence[Resting], section: ZeroConfig) -> Rest:
    """What `buckets` take under the config's offload sections, or their defaults."""
    states = section.offload_optimizer or OffloadOptimizer()
    weights = section.weights_offload or OffloadParam()
    # The first buckets that fit stay in memory: what is needed first cannot be read ahead.
    in_memory = 0
    room = weights.max_in_cpu
    offloaded: list[Resting] = []
    for bucket in buckets:
        if bucket.weights and bucket.shard <= room:
            room -= bucket.shard
            in_memory += bucket.weights
        elif bucket.weights:
            offloaded.append(bucket)
    return Rest(
        weights_in_memory=in_memory,
        state_buffers=_state_buffers(buckets, states),
        weight_buffers=_weight_buffers(offloaded, weights),
        disk=sum(b.tile for b in buckets) + sum(b.weights for b in offloaded),
    )


def _state_buffers(buckets: Sequence[Resting], section: OffloadOptimizer) -> int:
    """The most bytes of states in memory: in the step, or of gradients in backward."""
    most = 0
    nothing = Resting(0, 0, 0, 0, 0)
    tiles = [b for b in buckets if b.tile]
    writes_behind = section.pipeline_write and section.buffer_count
    leaving: list[int] = []
    for tile, following in zip(tiles, [*tiles[1:], nothing], strict=True):
        # Tensors of earlier buckets that are still being written.
        behind = sum(leaving[-section.buffer_count :]) if writes_behind else 0
        leaving = [*leaving[-section.buffer_count :], *tile.tensors]
        read_ahead = following if section.pipeline_read else nothing
        later = tile.tile + read_ahead.tile
        # The first step makes the states, and joins them; there are none to be read yet.
        first = tile.tile + tile.states + read_ahead.tile - read_ahead.states
        most = max(most, behind + max(later, first))
    # In backward reduced gradients are written while the next ones come.
    reduced = sorted((b.gradients for b in tiles), reverse=True)[: section.buffer_count + 1]
    return max(most, sum(reduced))


def _weight_buffers(offloaded: Sequence[Resting], section: OffloadParam) -> int:
    """The most bytes of weights in memory: while they are read ahead, or written in the step."""
    sizes = [b.weights for b in offloaded]
    if not sizes:
        return 0
    itemsize = max(b.weights // b.shard for b in offloaded if b.shard)
    window = section.buffer_count * section.buffer_size * itemsize
    reading = min(sum(sizes), window + max(sizes))
    leaving = sum(sorted(sizes, reverse=True)[: section.buffer_count + 1])
    return max(reading, leaving)
