"""The declaration of dscore-moe."""

from __future__ import annotations

from typing import Any, ClassVar

from ds_testing import PluginConformance


class TestDeclaration(PluginConformance):
    entry_point = "ds_moe.plugin"
    section = "expert_parallel"
    good_config: ClassVar[Any] = {"enabled": False}
    bad_configs: ClassVar[Any] = [{"enabled": 1}, {"expert_parallel_sizes": 2}]
