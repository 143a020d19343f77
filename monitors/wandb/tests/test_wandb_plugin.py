"""The section ``wandb``, and what is said where the package is missing.

tests/monitors has tests with the package.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ds_testing import ServicePluginConformance


class TestPlugin(ServicePluginConformance):
    entry_point = "ds_monitor_wandb.plugin"
    section = "wandb"
    good_config: ClassVar[Any] = {"enabled": True, "group": "g", "team": "t", "project": "p"}
    bad_configs: ClassVar[Any] = [{"enabled": 1}, {"project": None}, {"entity": "x"}]
    defaults: ClassVar[Any] = {
        "enabled": False,
        "group": None,
        "team": None,
        "project": "deepspeed",
    }
    package = "wandb"
    requirement = "wandb"
