"""The declaration of dscore-comm-gloo."""

from __future__ import annotations

from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_comm_gloo.plugin"
