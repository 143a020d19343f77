"""What sections ask of a run's mesh before it is there (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.plugins import Plugins

__all__ = ["tp_size"]


def tp_size(config: RunConfig, plugins: Plugins) -> int:
    """Over how many ranks the layers of the run are divided."""
    axes = (axis for answer in plugins.ask("ds_mesh_axes", config=config) for axis in answer.value)
    return next((axis.size for axis in axes if axis.name == "tp"), 1)
