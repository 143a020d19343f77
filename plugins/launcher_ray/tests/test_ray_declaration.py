"""The declaration of dscore-launcher-ray."""

from __future__ import annotations

from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_launcher_ray.plugin"
