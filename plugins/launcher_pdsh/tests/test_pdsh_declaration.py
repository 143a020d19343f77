"""The declaration of dscore-launcher-pdsh."""

from __future__ import annotations

from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_launcher_pdsh.plugin"
