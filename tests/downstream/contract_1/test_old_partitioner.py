"""old-partitioner against the contracts of plugins and partitioners."""

from __future__ import annotations

from ds_testing import PartitionerConformance, PluginConformance


class TestPlugin(PluginConformance):
    entry_point = "old_partitioner.plugin"
    section = "old_partitioner"
    good_config = {}


class TestPartitioner(PartitionerConformance):
    config = {"old_partitioner": {}}
