"""The section ``mlflow``, and what is said where the package is missing.

tests/monitors has tests with the package.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ds_testing import ServicePluginConformance


class TestPlugin(ServicePluginConformance):
    entry_point = "ds_monitor_mlflow.plugin"
    section = "mlflow"
    good_config: ClassVar[Any] = {"enabled": True, "tracking_uri": "runs", "run_id": "x"}
    bad_configs: ClassVar[Any] = [{"enabled": "yes"}, {"uri": "x"}]
    defaults: ClassVar[Any] = {
        "enabled": False,
        "tracking_uri": None,
        "experiment": None,
        "run_name": None,
        "run_id": None,
    }
    package = "mlflow"
    requirement = "mlflow-skinny"
