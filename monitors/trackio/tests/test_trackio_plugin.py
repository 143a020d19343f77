"""The section ``trackio``, and what is said where the package is missing.

tests/monitors has tests with the package.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ds_testing import ServicePluginConformance


class TestPlugin(ServicePluginConformance):
    entry_point = "ds_monitor_trackio.plugin"
    section = "trackio"
    good_config: ClassVar[Any] = {"enabled": True, "resume": "allow", "name": "n"}
    bad_configs: ClassVar[Any] = [{"project": ""}, {"resume": "yes"}]
    defaults: ClassVar[Any] = {
        "enabled": False,
        "project": "deepspeed",
        "name": None,
        "group": None,
        "resume": "never",
        "space_id": None,
    }
    package = "trackio"
    requirement = "trackio"
