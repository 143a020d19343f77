"""What sections ask of a run's mesh before it is there (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.plugins import Plugins


def tp_size(config: RunConfig, plugins: Plugins) -> int:
    """Over how many ranks the layers of the run are divided."""
    return next((axis.size for axis in plugins.mesh_axes(config) if axis.name == "tp"), 1)
