"""Blocks of neighbouring ranks, for links between hosts that are slower than those inside: hpZ and MiCS.

A block is `k` consecutive data-parallel ranks, those of a host or of a few. On the mesh it is the axis ``hpz`` or
``mics`` inside dp, with all that folds inside it (ep, sp). Of a parameter's replicas those in one block are near to
each other, and those at the same place in all blocks are far from each other. Without the keys there is no such axis.

MiCS: states are sharded over the near ranks, so weights are gathered in a block. Gradients are reduced to their owners
in each block, and what these have is added up over the far ranks. Then every block makes the same step.

hpZ: states are sharded over all ranks. Each rank also keeps its share of the block's copy of gathered weights, from
which they are gathered again until they change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_core.comm import ALONE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ds_core.mesh import Mesh

__all__ = ["Levels", "far", "levels", "near", "sharding_axes"]


def near(mesh: Mesh, replicas: Sequence[str]) -> tuple[str, ...]:
    """The axes of `replicas` along which ranks are in one block."""
    return tuple(a for a in replicas if a != mesh.alias["dp"][0])


def sharding_axes(mesh: Mesh, replicas: Sequence[str]) -> tuple[str, ...]:
    """The axes over which the states of parameters with these `replicas` are sharded: all, or with MiCS the near."""
    return near(mesh, replicas) if mesh.has("mics") else tuple(replicas)


def far(mesh: Mesh, replicas: Sequence[str]) -> tuple[str, ...]:
    """The axes of `replicas` over which those states are equal."""
    sharded = sharding_axes(mesh, replicas)
    return tuple(a for a in replicas if a not in sharded)


@dataclass(frozen=True, slots=True)
class Levels:
    """A group in blocks of `size` consecutive ranks. near: this rank's block; far: those at its place in all blocks."""

    near: Any
    far: Any
    size: int
    count: int


def levels(mesh: Mesh, axes: Sequence[str], size: int) -> Levels:
    """Own groups of the blocks along `axes`. Collective over the world, with the same arguments; `size` divides."""
    world = mesh.size(*axes)

    def mine(parts: Iterable[range]) -> Any:
        groups = [mesh.own_group(*axes, only=part) for part in parts]
        return next((g for g in groups if g is not ALONE), ALONE)

    near = mine(range(first, first + size) for first in range(0, world, size))
    return Levels(near, mine(range(place, world, size) for place in range(size)), size, world // size)
