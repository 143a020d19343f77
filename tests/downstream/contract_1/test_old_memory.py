"""old-memory against the contracts of plugins and of what is said of memory."""

from __future__ import annotations

from ds_testing import MemoryConformance, PluginConformance
from torch import nn


class TestPlugin(PluginConformance):
    entry_point = "old_memory.plugin"
    section = "old_memory"
    good_config = {"bytes_per_element": 18}
    bad_configs = ({"bytes_per_element": 0},)


class TestMemory(MemoryConformance):
    config = {"old_memory": {"bytes_per_element": 16}}

    def test_weights_are_on_every_rank(self) -> None:
        told = self.memory(nn.Linear(10, 10, bias=False, device="meta"), world=4)
        assert told["device"] == 100 * 4 + 100 * 12 / 4
