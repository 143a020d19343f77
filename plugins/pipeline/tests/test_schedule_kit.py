"""Schedules that plugins offer by name, and their kit: what is right passes, what is wrong does
not.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest
from ds_pipeline.conformance import PipelineScheduleConformance
from ds_pipeline.schedules.choose import find_schedule

from ds_core.errors import UsageError
from ds_core.plugins import Plugins
from ds_core.plugins.registry import PluginSettings

sys.path.insert(0, str(Path(__file__).parent))
OFFERS = {"waves": "own_schedule:GPipe", "forgetful": "own_schedule:Forgetful"}


def ds_pipeline_schedules() -> dict[str, str]:
    return OFFERS


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("offers_schedules")
    module.ds_pipeline_schedules = ds_pipeline_schedules  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


class Kit(PipelineScheduleConformance):
    name = "Waves"
    plugin = "offers_schedules"


class Forgetful(Kit):
    name = "forgetful"


def test_a_right_one_passes() -> None:
    Kit().test_every_shape_is_proven()
    Kit().test_a_buffer_for_each_that_is_kept()


def test_a_wrong_one_does_not() -> None:
    with pytest.raises(AssertionError, match="1 stages, 1 micro-batches: "):
        Forgetful().test_every_shape_is_proven()


def test_a_name_that_nobody_offers() -> None:
    plugins = Plugins(PluginSettings(load=["offers_schedules"]))
    with pytest.raises(
        UsageError,
        match=r"no pipeline schedule is called 'wavs'; did you mean 'waves'\?.*zero_bubble",
    ):
        find_schedule("wavs", plugins)
    assert find_schedule("waves", plugins) is not None
    assert "offers_schedules" in plugins.members()
