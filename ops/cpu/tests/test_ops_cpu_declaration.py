"""The declaration of dscore-ops-cpu."""

from __future__ import annotations

from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_ops_cpu.plugin"
