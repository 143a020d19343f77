"""The declaration of dscore-rendezvous."""

from __future__ import annotations

from ds_testing import PluginConformance, RendezvousConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_rendezvous.plugin"


class TestRendezvous(RendezvousConformance):
    plugin = "ds_rendezvous.plugin"

    def environment(self, rank: int, size: int) -> dict[str, str]:
        job = "OMPI_COMM_WORLD"
        return {f"{job}_RANK": str(rank), f"{job}_SIZE": str(size), f"{job}_LOCAL_RANK": str(rank)}
