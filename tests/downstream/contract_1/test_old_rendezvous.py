"""old-rendezvous against the contracts of plugins and rendezvous."""

from __future__ import annotations

from collections.abc import Mapping

from ds_testing import PluginConformance, RendezvousConformance
from old_rendezvous.job import PREFIX


class TestPlugin(PluginConformance):
    entry_point = "old_rendezvous.plugin"


class TestRendezvous(RendezvousConformance):
    plugin = "old_rendezvous.plugin"

    def environment(self, rank: int, size: int) -> Mapping[str, str]:
        values = {"RANK": str(rank), "SIZE": str(size), "SLOT": "0", "HOST": "localhost"}
        return {PREFIX + name: value for name, value in values.items()}
