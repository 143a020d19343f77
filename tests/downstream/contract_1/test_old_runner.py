"""old-runner against the contracts of plugins and runners."""

from __future__ import annotations

from ds_testing import PluginConformance, RunnerConformance


class TestPlugin(PluginConformance):
    entry_point = "old_runner.plugin"
    section = "old_runner"
    good_config = {}


class TestRunner(RunnerConformance):
    config = {"old_runner": {}}
