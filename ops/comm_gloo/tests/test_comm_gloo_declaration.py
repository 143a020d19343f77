"""The declaration of ds-comm-gloo."""

from __future__ import annotations

from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_comm_gloo.plugin"
