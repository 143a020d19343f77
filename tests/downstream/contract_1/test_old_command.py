"""old-command against the contracts of plugins and commands."""

from __future__ import annotations

import json
from pathlib import Path

from ds_testing import CommandConformance, PluginConformance


class TestPlugin(PluginConformance):
    entry_point = "old_command.plugin"


class TestCommand(CommandConformance):
    plugin = "old_command.plugin"

    def test_it_says_who_owns_a_section(self, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        file.write_text('{"fp16": {}}')
        done = self.run("old-command", str(file), "--json")
        assert json.loads(done.stdout) == {"fp16": "dscore-train, or nobody"}
