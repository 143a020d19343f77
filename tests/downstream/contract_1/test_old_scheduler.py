"""old-scheduler against the contracts of plugins and schedules."""

from __future__ import annotations

from ds_testing import PluginConformance, SchedulerConformance


class TestPlugin(PluginConformance):
    entry_point = "old_scheduler.plugin"


class TestSchedule(SchedulerConformance):
    plugin = "old_scheduler.plugin"
    params = {"OldScheduler": {"every": 3}}

    def test_rates_by_hand(self) -> None:
        optimizer = self.optimizer()
        rates = self.rates(self.make("OldScheduler", optimizer), optimizer, 7)
        assert [row[0] for row in rates] == [0.1, 0.1, 0.1, 0.05, 0.05, 0.05, 0.025]
