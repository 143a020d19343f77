"""The declaration of old-mesh: a mesh from the object that a user has (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_core.mesh import Mesh


def ds_mesh(mpu: Any, rank: int, world_size: int) -> Mesh | None:
    """The mesh of an object that is ours; None for any other."""
    from ds_core.entries import Axis
    from ds_core.mesh import plan_mesh

    ranks = getattr(mpu, "ranks_per_tower", None)
    return None if ranks is None else plan_mesh([Axis("towers", ranks, inside="dp")], world_size, rank)
