"""The section ``comet``, and what is said where the package is missing.

tests/monitors has tests with the package.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ds_testing import ServicePluginConformance


class TestPlugin(ServicePluginConformance):
    entry_point = "ds_monitor_comet.plugin"
    section = "comet"
    good_config: ClassVar[Any] = {
        "enabled": True,
        "experiment_key": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        "mode": "get",
        "online": False,
    }
    bad_configs: ClassVar[Any] = [
        {"samples_log_interval": 0},
        {"experiment_key": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},
        {"experiment_key": "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},
        {"experiment_key": "--------------------------------"},
        {"mode": "new"},
        {"online": "no"},
    ]
    defaults: ClassVar[Any] = {
        "enabled": False,
        "samples_log_interval": 100,
        "project": None,
        "workspace": None,
        "api_key": None,
        "experiment_name": None,
        "experiment_key": None,
        "online": None,
        "mode": None,
    }
    package = "comet_ml"
    requirement = "comet_ml"
