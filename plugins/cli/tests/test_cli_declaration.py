"""The declaration of ds-cli."""

from __future__ import annotations

from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_cli.plugin"
