"""The declaration of dscore-new."""

from __future__ import annotations

from ds_testing import PluginConformance


class TestPlugin(PluginConformance):
    entry_point = "ds_new.plugin"
