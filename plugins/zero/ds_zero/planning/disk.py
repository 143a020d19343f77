"""What a rank holds in memory and on disk where a store frees memory: see `ds_zero.offload.tiled_step` and
`ds_zero.offload.away`.

Stores keep their buffers, so what is at most under way counts for the whole run: the bucket that a
step updates, with those that are read and written beside it, and the weights that are read ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_zero.config import OffloadOptimizer, OffloadParam, ZeroConfig


@dataclass(frozen=True, slots=True)
class Resting:
    """Bytes of one bucket's states on this rank.

    weights: 0 where they do not rest on disk. shard: its elements. kept: the number of states.
    """

    masters: int
    states: int
    gradients: int
    weights: int
    shard: int
    kept: int = 2

    @property
    def tensors(self) -> list[int]:
        """What a step writes, without weights: the masters, and each of the `kept` states."""
        return [self.masters, *([self.states // self.kept] * self.kept if self.kept else [])]

    @property
    def tile(self) -> int:
        """What a step brings into memory, without weights."""
        return self.masters + self.states + self.gradients


def rest_on_disk(buckets: Sequence[Resting], section: ZeroConfig) -> tuple[int, int, int, int]:
    """(bytes of weights that stay in memory, of buffers for states, of buffers for weights, on
    disk).
    """
    states = section.offload_optimizer or OffloadOptimizer()
    weights = section.weights_offload or OffloadParam()
    stay = 0
    room = weights.max_in_cpu
    away: list[Resting] = []
    for bucket in buckets:
        if bucket.weights and bucket.shard <= room:
            room -= bucket.shard
            stay += bucket.weights
        elif bucket.weights:
            away.append(bucket)
    disk = sum(b.tile for b in buckets) + sum(b.weights for b in away)
    return stay, _for_states(buckets, states), _for_weights(away, weights), disk


def _for_states(buckets: Sequence[Resting], section: OffloadOptimizer) -> int:
    most = 0
    nothing = Resting(0, 0, 0, 0, 0)
    tiles = [b for b in buckets if b.tile]
    leaving: list[int] = []
    for tile, following in zip(tiles, [*tiles[1:], nothing], strict=True):
        behind = (
            sum(leaving[-section.buffer_count :])
            if section.pipeline_write and section.buffer_count
            else 0
        )
        leaving = [*leaving[-section.buffer_count :], *tile.tensors]
        later = tile.tile + (following.tile if section.pipeline_read else 0)
        # The first step makes the states, and joins them; there are none to be read yet.
        first = (
            tile.tile
            + tile.states
            + (following.tile - following.states if section.pipeline_read else 0)
        )
        most = max(most, behind + max(later, first))
    reduced = sorted((b.gradients for b in tiles), reverse=True)[: section.buffer_count + 1]
    return max(most, sum(reduced))


def _for_weights(away: Sequence[Resting], section: OffloadParam) -> int:
    sizes = [b.weights for b in away]
    if not sizes:
        return 0
    window = (
        section.buffer_count
        * section.buffer_size
        * max(b.weights // b.shard for b in away if b.shard)
    )
    reading = min(sum(sizes), window + max(sizes))
    leaving = sum(sorted(sizes, reverse=True)[: section.buffer_count + 1])
    return max(reading, leaving)
