"""old-monitor against the contracts of plugins and monitors."""

from __future__ import annotations

import json
from pathlib import Path

from ds_testing import MonitorConformance, PluginConformance
from old_monitor.monitor import OldMonitor


class TestPlugin(PluginConformance):
    entry_point = "old_monitor.plugin"
    section = "old_monitor"
    good_config = {"file": "events.jsonl"}
    bad_configs = ({}, {"file": ""}, {"file": 3})


class TestMonitor(MonitorConformance):
    def make_monitor(self, tmp_path: Path) -> OldMonitor:
        return OldMonitor(str(tmp_path / "events.jsonl"))

    def read_events(self, tmp_path: Path) -> list[tuple[str, float, int]]:
        file = tmp_path / "events.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [(name, value, step) for name, value, step in map(json.loads, lines)]
