"""The declaration of dscore-state-stores."""

from __future__ import annotations

from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_state_stores.plugin"
