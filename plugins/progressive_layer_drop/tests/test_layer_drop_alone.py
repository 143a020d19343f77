"""The declaration, which needs no other package of this repository's."""

from __future__ import annotations

from ds_testing import PluginConformance


class TestPlugin(PluginConformance):
    entry_point = "ds_progressive_layer_drop.plugin"
    section = "progressive_layer_drop"
    good_config = {"enabled": True, "theta": 0.5}  # noqa: RUF012
