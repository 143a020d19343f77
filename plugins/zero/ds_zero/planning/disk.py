"""What a rank holds in memory and on disk where a store frees memory.

See `ds_zero.offload.tiled_step` and `ds_zero.buckets.evicted`.

Stores keep their buffers, so what is at most under way counts for the whole run: the bucket that a
step updates, with those that are read and written beside it, and the weights that are read ahead.
"""

from __future__ import annotations

from collections.abc import Sequence

from ds_plan import Kinds

from ds_zero.buckets.sizes import Bytes, Place
from ds_zero.config import OffloadOptimizer, OffloadParam, ZeroConfig
from ds_zero.planning.buckets import SimulatedBucket
from ds_zero.planning.states import RankStates


def rest_on_disk(
    buckets: Sequence[SimulatedBucket], states: RankStates, section: ZeroConfig
) -> tuple[Kinds, int]:
    """What `buckets` take under the config's offload sections, or their defaults: host memory, and
    bytes on disk.

    Of that memory `parameters` are weights that ``offload_param.max_in_cpu`` keeps there; states go
    through `buckets`, weights through `gathered`.
    """
    weights = section.weights_offload or OffloadParam()
    # The first buckets that fit stay in memory: what is needed first cannot be read ahead.
    in_memory = 0
    room = weights.max_in_cpu
    evicted: list[SimulatedBucket] = []
    for bucket in buckets:
        if states.weights(bucket).place is not Place.DISK:
            continue
        if bucket.layout.shard_numel <= room:
            room -= bucket.layout.shard_numel
            in_memory += bucket.shard_bytes
        else:
            evicted.append(bucket)
    tiles = [states.masters(bucket) for bucket in buckets if bucket.trained]
    host = Kinds(
        parameters=in_memory,
        buckets=_state_buffers(
            tiles, section.offload_optimizer or OffloadOptimizer(), states.run.states
        ),
        gathered=_weight_buffers(evicted, weights),
    )
    return host, sum(tile.total for tile in tiles) + sum(b.shard_bytes for b in evicted)


def _state_buffers(tiles: Sequence[Bytes], section: OffloadOptimizer, kept: int) -> int:
    """The most bytes of states in memory: in the step, or of gradients in backward.

    kept: the number of the optimizer's states per parameter.
    """
    most = 0
    nothing = Bytes(Place.DISK)
    tiles = [tile for tile in tiles if tile.total]
    writes_behind = section.pipeline_write and section.buffer_count
    leaving: list[int] = []
    for tile, following in zip(tiles, [*tiles[1:], nothing], strict=True):
        # Tensors of earlier buckets that are still being written.
        behind = sum(leaving[-section.buffer_count :]) if writes_behind else 0
        # A step writes the masters, and each of the `kept` states.
        written = [tile.masters, *([tile.states // kept] * kept if kept else [])]
        leaving = [*leaving[-section.buffer_count :], *written]
        read_ahead = following if section.pipeline_read else nothing
        later = tile.total + read_ahead.total
        # The first step makes the states, and joins them; there are none to be read yet.
        first = tile.total + tile.states + read_ahead.total - read_ahead.states
        most = max(most, behind + max(later, first))
    # In backward reduced gradients are written while the next ones come.
    reduced = sorted((tile.gradients for tile in tiles), reverse=True)[: section.buffer_count + 1]
    return max(most, sum(reduced))


def _weight_buffers(evicted: Sequence[SimulatedBucket], section: OffloadParam) -> int:
    """The most bytes of weights in memory: while they are read ahead, or written in the step."""
    if not evicted:
        return 0
    sizes = [b.shard_bytes for b in evicted]
    itemsize = max(b.dtype.itemsize for b in evicted)
    window = section.buffer_count * section.buffer_size * itemsize
    reading = min(sum(sizes), window + max(sizes))
    leaving = sum(sorted(sizes, reverse=True)[: section.buffer_count + 1])
    return max(reading, leaving)
