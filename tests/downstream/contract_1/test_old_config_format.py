"""old-config-format against the contracts of plugins and config formats."""

from __future__ import annotations

from ds_testing import ConfigFormatConformance, PluginConformance


class TestPlugin(PluginConformance):
    entry_point = "old_config_format.plugin"


class TestFormat(ConfigFormatConformance):
    plugin = "old_config_format.plugin"
    samples = {
        ".old_config_format": ("a = 1\n[fp16]\nenabled = true", {"a": 1, "fp16": {"enabled": True}}),
    }
    broken = {".old_config_format": "a = {"}
    repeated = {".old_config_format": "a = 1\na = 2"}
