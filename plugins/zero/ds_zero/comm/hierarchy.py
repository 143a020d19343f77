"""Blocks of neighbouring ranks, for links between hosts that are slower than those inside: hpZ and
MiCS.

A block is `k` consecutive data-parallel ranks, those of a host or of a few. On the mesh it is the
axis ``hpz`` or ``mics`` inside dp, with all that folds inside it (ep, sp). Of a parameter's
replicas those in one block are the inner ranks, and those at the same place in all blocks the
outer ranks. Without the keys there is no such axis.

MiCS: states are sharded over the inner ranks, so weights are gathered in a block. Gradients are
reduced to their owners in each block, and what these have is added up over the outer ranks. Then
every block makes the same step.

hpZ: states are sharded over all ranks. Each rank also keeps its share of the block's copy of
gathered weights, from which they are gathered again until they change.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core import comm
from ds_core.comm import ALONE
from ds_zero.comm.collectives import (
    AllGather,
    Chain,
    GradientReduce,
    Room,
    WeightGather,
    Works,
    all_gather,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from jaxtyping import Shaped

    from ds_core.mesh import Mesh
    from ds_zero.buckets.flat import FlatBucket


def inner_axes(mesh: Mesh, replicas: Sequence[str]) -> tuple[str, ...]:
    """The axes of `replicas` along which ranks are in one block."""
    return tuple(a for a in replicas if a != mesh.alias["dp"][0])


def sharding_axes(mesh: Mesh, replicas: Sequence[str]) -> tuple[str, ...]:
    """The axes over which the states of parameters with these `replicas` are sharded: all, or with
    MiCS the inner.
    """
    return inner_axes(mesh, replicas) if mesh.has("mics") else tuple(replicas)


def outer_axes(mesh: Mesh, replicas: Sequence[str]) -> tuple[str, ...]:
    """The axes of `replicas` over which those states are equal."""
    sharded = sharding_axes(mesh, replicas)
    return tuple(a for a in replicas if a not in sharded)


@dataclass(frozen=True, slots=True)
class Levels:
    """The process groups of ranks in blocks of `size` consecutive ones."""

    # This rank's block.
    inner: Any
    # The ranks at its place in all blocks.
    outer: Any
    # Ranks per block, and how many blocks.
    size: int
    count: int


def levels(mesh: Mesh, axes: Sequence[str], size: int) -> Levels:
    """Own groups of the blocks along `axes`.

    Collective over the world, with the same arguments; `size` divides.
    """
    world = mesh.size(*axes)

    def mine(parts: Iterable[range]) -> Any:
        groups = [mesh.own_group(*axes, only=part) for part in parts]
        return next((g for g in groups if g is not ALONE), ALONE)

    inner = mine(range(first, first + size) for first in range(0, world, size))
    outer = mine(range(place, world, size) for place in range(size))
    return Levels(inner, outer, size, world // size)


def in_blocks(
    mesh: Mesh, wanted: Iterable[tuple[str, ...]], size_of: Callable[[tuple[str, ...]], int]
) -> dict[tuple[str, ...], Levels]:
    """The blocks of ``size_of(axes)`` ranks along each of the `wanted` axes, where these are
    several blocks of several.

    Collective over the world; ranks may want different axes.
    """
    sizes = {axes: size_of(axes) for axes in wanted_anywhere(wanted)}
    return {
        axes: levels(mesh, axes, size)
        for axes, size in sizes.items()
        if 1 < size < mesh.size(*axes)
    }


def wanted_anywhere(wanted: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """The axes that any rank wants, in order. Collective over the world."""
    return sorted({tuple(axes) for rank in comm.all_gather_json(sorted(wanted)) for axes in rank})


def ranks_per_host(mesh: Mesh, axes: Sequence[str]) -> int:
    """How many neighbours along `axes` share a host; 1 where hosts differ in that.

    Collective over the world.
    """
    everyone = comm.all_gather_json(host_name())
    mine = [everyone[rank] for rank in mesh.ranks(*axes)]
    size = mine.count(mine[0])
    even = [mine[at - at % size] for at in range(len(mine))] == mine and len(
        set(mine)
    ) * size == len(mine)
    found = set(comm.all_gather_json(size if even else 1))
    return found.pop() if len(found) == 1 else 1


def host_name() -> str:
    """What is equal on the ranks of one host, or of one container there."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return socket.gethostname()


# -- MiCS ------------------------------------------------------------------------------------------


def added_outer(inner: GradientReduce, outer: Any) -> GradientReduce:
    """MiCS: a reduction over the inner ranks by other collectives, whose result is added up over
    the outer ones.

    outer: the group of the outer ranks.
    """

    def reduce(
        bucket: FlatBucket, source: Shaped[Tensor, " full"], group: Any, room: Room
    ) -> tuple[Works, Shaped[Tensor, " shard"]]:
        works, out = ([], source) if bucket.world == 1 else inner(bucket, source, group, room)

        def add() -> Works:
            comm.label(bucket.about_gradients)
            return [comm.all_reduce(out, group=outer, async_op=True)]

        return [Chain(works, add)], out

    return reduce


@dataclass(frozen=True, slots=True)
class TwoSteps(WeightGather):
    """MiCS: shards go to the other hosts' ranks at this one's place there, and then everything to
    all ranks of a host.

    So each shard crosses a link between two hosts once.

    hosts: blocks of ranks that are on one host.
    """

    hosts: Levels

    def start(self, bucket: FlatBucket) -> Works:
        """See `WeightGather.start`."""
        mine = bucket.own()
        full = bucket.full
        count = self.hosts.count
        across = torch.empty(count * mine.numel(), dtype=mine.dtype, device=mine.device)

        def inside() -> Works:
            pairs = zip(full.chunk(count), across.chunk(count), strict=True)
            comm.label(bucket.about_weights)
            return [
                comm.all_gather_into_tensor(o, i, group=self.hosts.inner, async_op=True)
                for o, i in pairs
            ]

        work = comm.all_gather_into_tensor(across, mine, group=self.hosts.outer, async_op=True)
        return [Chain([work], inside)]


def two_steps(mesh: Mesh, wanted: Iterable[tuple[str, ...]]) -> dict[tuple[str, ...], TwoSteps]:
    """How to gather in two steps what is sharded over the `wanted` axes, for those whose ranks are
    on several hosts.

    Collective over the world; ranks may want different ones.
    """
    hosts = in_blocks(mesh, wanted, lambda axes: ranks_per_host(mesh, axes))
    return {axes: TwoSteps(found) for axes, found in hosts.items()}


# -- hpZ -------------------------------------------------------------------------------------------


class SecondCopy(WeightGather):
    """hpZ: gathers over all ranks as another says, and from then on over the inner ranks, until the
    weights change.
    """

    def __init__(self, group: Any, size: int, place: int) -> None:
        # hpZ's inner ranks, their number, and this rank's index among them.
        self.group = group
        self.size = size
        self.place = place
        # How weights are gathered over all ranks; their values are kept as they came.
        self.gather: WeightGather = AllGather()
        # This rank's share of the gathered weights, for the gathers over the inner ranks.
        self.copy: Tensor | None = None
        # Whether it is that of the weights now; equal on all ranks.
        self.valid = False

    @property
    def exact(self) -> bool:
        """See `WeightGather.exact`."""
        return self.gather.exact

    def around(self, gather: WeightGather) -> SecondCopy:
        """This, for a gather over all ranks by `gather`."""
        self.gather = gather
        return self

    def start(self, bucket: FlatBucket) -> Works:
        """See `WeightGather.start`."""
        # in which values are sent
        full = bucket.full
        dtype = self.gather.dtype or bucket.dtype
        mine = self.copy
        if mine is None or mine.dtype != dtype or not self.valid:
            return [Chain(self.gather.start(bucket), lambda: self._keep(bucket, dtype))]
        if self.size == 1:
            comm.label("")  # else it would be the name of the next collective
            full.copy_(mine)
            return []
        return all_gather(full, mine, dtype, self.group)

    def _keep(self, bucket: FlatBucket, dtype: torch.dtype) -> Works:
        """Keep this rank's share of gathered weights."""
        full = bucket.full
        if self.copy is None or self.copy.dtype != dtype:
            self.copy = torch.empty(full.numel() // self.size, dtype=dtype, device=full.device)
            for param in bucket.params:
                param.ds_secondary_tensor = self.copy  # type: ignore[attr-defined]
        self.copy.copy_(full.view(self.size, -1)[self.place])
        self.valid = True
        return []

    def free(self, bucket: FlatBucket) -> None:
        """Forget the copy."""
        self.copy = None
        self.valid = False
        for param in bucket.params:
            param.ds_secondary_tensor = None  # type: ignore[attr-defined]


def second_copy(bucket: FlatBucket, mesh: Mesh) -> SecondCopy | None:
    """hpZ's copy of the weights of `bucket`; None where all its ranks are in one block."""
    axes = inner_axes(mesh, bucket.axes)
    if not mesh.has("hpz") or mesh.size(*axes) == bucket.world:
        return None
    return SecondCopy(mesh.group(*axes), mesh.size(*axes), mesh.index(*axes))
