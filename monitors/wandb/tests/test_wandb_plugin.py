"""The section ``wandb``, and what is said where the package is missing; tests/monitors has tests
with the package.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ds_monitor_wandb.config import WandbConfig
from ds_monitor_wandb.plugin import ds_check, ds_monitors
from ds_testing import PluginConformance

from ds_core.errors import PluginError


class TestPlugin(PluginConformance):
    entry_point = "ds_monitor_wandb.plugin"
    section = "wandb"
    good_config: ClassVar[Any] = {"enabled": True, "group": "g", "team": "t", "project": "p"}
    bad_configs: ClassVar[Any] = [{"enabled": 1}, {"project": None}, {"entity": "x"}]


def context(section: WandbConfig | None) -> Any:
    config = SimpleNamespace(section={"wandb": section}.get, redacted=dict)
    return SimpleNamespace(config=config)


def test_the_defaults_of_the_documents() -> None:
    assert WandbConfig().model_dump() == {
        "enabled": False,
        "group": None,
        "team": None,
        "project": "deepspeed",
    }


def test_a_missing_package_matters_only_when_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for off in (None, WandbConfig()):
        assert list(ds_check(context(off).config)) == [] and list(ds_monitors(context(off))) == []
    on = context(WandbConfig(enabled=True))
    (problem,) = ds_check(on.config)
    assert str(problem) == "wandb.enabled: the package wandb is not installed; pip install wandb"
    with pytest.raises(
        PluginError, match="section wandb is enabled, but the package wandb cannot be imported"
    ):
        ds_monitors(on)
