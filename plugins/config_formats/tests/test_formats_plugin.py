"""dscore-config-formats against the kits."""

from __future__ import annotations

from ds_testing import ConfigFormatConformance, PluginConformance

DATA = {"a": 1, "b": {"c": [1.5, True, "x"]}}


class TestConfigFormats(PluginConformance):
    entry_point = "ds_config_formats.plugin"


class TestFormats(ConfigFormatConformance):
    plugin = "ds_config_formats.plugin"
    samples = {
        ".hjson": ("{a: 1, b: {c: [1.5, true, x\n]}}", DATA),
        ".yaml": ("a: 1\nb: {c: [1.5, true, x]}", DATA),
        ".yml": ("a: 1\nb: {c: [1.5, true, x]}", DATA),
        ".toml": ("a = 1\n[b]\nc = [1.5, true, 'x']", DATA),
    }
    broken = {".hjson": "{a: [1, 2", ".yaml": "a: [1", ".yml": "a: [1", ".toml": "a = "}
    repeated = {
        ".hjson": "{a: 1\na: 2}",
        ".yaml": "a: 1\na: 2",
        ".yml": "a: 1\na: 2",
        ".toml": "a = 1\na = 2",
    }
