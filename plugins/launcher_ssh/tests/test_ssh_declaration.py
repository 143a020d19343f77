"""The declaration of dscore-launcher-ssh."""

from __future__ import annotations

from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_launcher_ssh.plugin"
