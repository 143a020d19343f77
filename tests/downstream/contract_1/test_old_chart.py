"""old-chart against the contracts of plugins and charts."""

from __future__ import annotations

from ds_testing import ChartConformance, PluginConformance


class TestPlugin(PluginConformance):
    entry_point = "old_chart.plugin"
    section = "old_chart"
    good_config = {"steps": 10}
    bad_configs = ({"steps": 0},)


class TestChart(ChartConformance):
    config = {"train_batch_size": 8, "old_chart": {"steps": 10}}

    def test_it_counts_samples(self) -> None:
        (chart,) = self.charts()
        assert chart.text == "10 steps of 8 samples: 80 samples"
