"""The section ``comet``, and what is said where the package is missing; tests/monitors has tests
with the package.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ds_monitor_comet.config import CometConfig
from ds_monitor_comet.plugin import ds_check, ds_monitors
from ds_testing import PluginConformance

from ds_core.errors import PluginError


class TestPlugin(PluginConformance):
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


def context(section: CometConfig | None) -> Any:
    config = SimpleNamespace(section={"comet": section}.get, redacted=dict)
    return SimpleNamespace(config=config)


def test_the_defaults_of_the_documents() -> None:
    assert CometConfig().model_dump() == {
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


def test_a_missing_package_matters_only_when_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "comet_ml", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for off in (None, CometConfig()):
        assert list(ds_check(context(off).config)) == [] and list(ds_monitors(context(off))) == []
    on = context(CometConfig(enabled=True))
    (problem,) = ds_check(on.config)
    assert (
        str(problem) == "comet.enabled: the package comet_ml is not installed; pip install comet_ml"
    )
    with pytest.raises(
        PluginError, match="section comet is enabled, but the package comet_ml cannot be imported"
    ):
        ds_monitors(on)
