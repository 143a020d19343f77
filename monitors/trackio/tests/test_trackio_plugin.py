"""The section ``trackio``, and what is said where the package is missing; tests/monitors has tests
with the package.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ds_monitor_trackio.config import TrackioConfig
from ds_monitor_trackio.plugin import ds_check, ds_monitors
from ds_testing import PluginConformance

from ds_core.errors import PluginError


class TestPlugin(PluginConformance):
    entry_point = "ds_monitor_trackio.plugin"
    section = "trackio"
    good_config: ClassVar[Any] = {"enabled": True, "resume": "allow", "name": "n"}
    bad_configs: ClassVar[Any] = [{"project": ""}, {"resume": "yes"}]


def context(section: TrackioConfig | None) -> Any:
    config = SimpleNamespace(section={"trackio": section}.get, redacted=dict)
    return SimpleNamespace(config=config)


def test_the_defaults_of_the_documents() -> None:
    assert TrackioConfig().model_dump() == {
        "enabled": False,
        "project": "deepspeed",
        "name": None,
        "group": None,
        "resume": "never",
        "space_id": None,
    }


def test_a_missing_package_matters_only_when_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for off in (None, TrackioConfig()):
        assert list(ds_check(context(off).config)) == [] and list(ds_monitors(context(off))) == []
    on = context(TrackioConfig(enabled=True))
    (problem,) = ds_check(on.config)
    assert (
        str(problem) == "trackio.enabled: the package trackio is not installed; pip install trackio"
    )
    with pytest.raises(
        PluginError, match="section trackio is enabled, but the package trackio cannot be imported"
    ):
        ds_monitors(on)
