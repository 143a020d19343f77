"""The declaration of dscore-kernel-kit."""

from __future__ import annotations

from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_kernel_kit.plugin"
