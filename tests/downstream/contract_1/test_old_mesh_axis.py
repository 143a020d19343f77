"""old-mesh-axis against the contracts of plugins and mesh axes."""

from __future__ import annotations

from ds_testing import MeshAxisConformance, PluginConformance
from torch import Tensor, nn


class TestPlugin(PluginConformance):
    entry_point = "old_mesh_axis.plugin"
    section = "old_mesh_axis"
    good_config = {"size": 2}
    bad_configs = ({"size": 0},)


class Towers(nn.Module):
    """A layer of each rank's own, and one that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.shared = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.shared(self.tower(x).tanh())
        return out.square().mean()


class TestAxis(MeshAxisConformance):
    config = {"old_mesh_axis": {"size": 2}}
    make_model = staticmethod(Towers)
    held = {"old_mesh_axis": ("tower.weight", "tower.bias")}
