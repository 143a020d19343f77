"""The section ``mlflow``, and what is said where the package is missing; tests/monitors has tests
with the package.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ds_monitor_mlflow.config import MLflowConfig
from ds_monitor_mlflow.plugin import ds_check, ds_monitors
from ds_testing import PluginConformance

from ds_core.errors import PluginError


class TestPlugin(PluginConformance):
    entry_point = "ds_monitor_mlflow.plugin"
    section = "mlflow"
    good_config: ClassVar[Any] = {"enabled": True, "tracking_uri": "runs", "run_id": "x"}
    bad_configs: ClassVar[Any] = [{"enabled": "yes"}, {"uri": "x"}]


def context(section: MLflowConfig | None) -> Any:
    config = SimpleNamespace(section={"mlflow": section}.get, redacted=dict)
    return SimpleNamespace(config=config)


def test_the_defaults_of_the_documents() -> None:
    assert MLflowConfig().model_dump() == {
        "enabled": False,
        "tracking_uri": None,
        "experiment": None,
        "run_name": None,
        "run_id": None,
    }


def test_a_missing_package_matters_only_when_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for off in (None, MLflowConfig()):
        assert list(ds_check(context(off).config)) == [] and list(ds_monitors(context(off))) == []
    on = context(MLflowConfig(enabled=True))
    (problem,) = ds_check(on.config)
    assert (
        str(problem)
        == "mlflow.enabled: the package mlflow is not installed; pip install mlflow-skinny"
    )
    with pytest.raises(
        PluginError, match="section mlflow is enabled, but the package mlflow cannot be imported"
    ):
        ds_monitors(on)
