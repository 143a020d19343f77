"""old-gradients against the contracts of plugins and of what changes gradients."""

from __future__ import annotations

from ds_testing import GradientsConformance, PluginConformance


class TestPlugin(PluginConformance):
    entry_point = "old_gradients.plugin"
    section = "old_gradients"
    good_config = {"limit": 0.5}
    bad_configs = ({}, {"limit": 0})


class TestGradients(GradientsConformance):
    config = {"old_gradients": {"limit": 0.01}}
