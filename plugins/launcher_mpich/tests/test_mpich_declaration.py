"""The declaration of dscore-launcher-mpich."""

from __future__ import annotations

from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_launcher_mpich.plugin"
