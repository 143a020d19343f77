"""The declaration, which needs no other package of this repository's."""

from __future__ import annotations

from ds_testing import PluginConformance


class TestPlugin(PluginConformance):
    entry_point = "ds_reproducibility.plugin"
    section = "reproducibility"
    good_config = {"seed": 5, "samples": "blocks"}  # noqa: RUF012
