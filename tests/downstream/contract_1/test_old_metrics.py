"""old-metrics against the contracts of plugins, observers and metrics."""

from __future__ import annotations

from ds_testing import ObserverConformance, PluginConformance


class TestPlugin(PluginConformance):
    entry_point = "old_metrics.plugin"
    section = "old_metrics"
    good_config = {"every": 10}
    bad_configs = ({"every": 0},)


class TestMetrics(ObserverConformance):
    config = {"old_metrics": {}}
    metrics = ("Train/Samples/largest_weight",)
