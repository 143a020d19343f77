"""old-mesh against the contracts of plugins and meshes."""

from __future__ import annotations

from ds_testing import MeshConformance, PluginConformance


class Units:
    """What a library with groups of its own may have."""

    ranks_per_tower = 2


class TestPlugin(PluginConformance):
    entry_point = "old_mesh.plugin"


class TestMesh(MeshConformance):
    make_mpu = staticmethod(Units)
    sizes = {"dp": 2, "towers": 2}
