"""old-loader against the contracts of plugins and loaders."""

from __future__ import annotations

from typing import Any

from ds_testing import LoaderConformance, PluginConformance


class TestPlugin(PluginConformance):
    entry_point = "old_loader.plugin"
    section = "old_loader"
    good_config = {}


class TestLoader(LoaderConformance):
    config = {"old_loader": {}}
    drops = True

    def make_dataset(self) -> list[str]:
        return [str(i) * (i % 7 + 1) for i in range(50)]

    def samples_of(self, batch: Any) -> list[Any]:
        return list(batch)
