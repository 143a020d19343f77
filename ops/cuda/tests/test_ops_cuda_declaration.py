"""The declaration of dscore-ops-cuda."""

from __future__ import annotations

from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_ops_cuda.plugin"
