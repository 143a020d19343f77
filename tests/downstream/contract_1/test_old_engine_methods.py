"""old-engine-methods against the contracts of plugins and engine methods."""

from __future__ import annotations

from typing import Any

from ds_testing import EngineMethodsConformance, PluginConformance


class TestPlugin(PluginConformance):
    entry_point = "old_engine_methods.plugin"
    section = "old_engine_methods"
    good_config = {}


class TestMethods(EngineMethodsConformance):
    config = {"old_engine_methods": {}}
    names = ("count_parameters",)

    def test_the_number_of_parameters(self, engine: Any) -> None:
        for param in engine.module.parameters():
            param.requires_grad_(False)
        assert engine.count_parameters() == sum(p.numel() for p in engine.module.parameters()) > 0
        assert engine.count_parameters(trainable_only=True) == 0
