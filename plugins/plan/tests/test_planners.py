"""What is planned comes from plugins: one that is not ours adds its rows (hook ``ds_planners``)."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from ds_command_kit.app import make_app
from ds_testing import PluginConformance
from typer.testing import CliRunner

SLICED = '''
"""Everything is cut into as many slices as there are ranks, and needs a key that a plan has not."""
from ds_plan import Kinds, Need, Offload, Planner

def ds_config():
    from ds_core.config import Section
    class Sliced(Section):
        """Slices."""
        on: bool = False
    return Sliced

def ds_planners():
    return {"sliced": "sliced_planner:SlicedPlanner"}

class SlicedPlanner(Planner):
    def prepare(self, raw):
        return {key: value for key, value in raw.items() if key != "only_in_a_run"}

    def choices(self, config, module, run):
        return [self.chosen(config, module, run, 0)]

    def chosen(self, config, module, run, rank):
        if not self.raw.get("sliced", {}).get("on"):
            return None
        size = 8 * sum(p.numel() for p in module.parameters()) // run.world
        return Need(7, Offload.NONE, Kinds(parameters=size), Kinds(), 0, 0, 0, 0)
'''

CONFIG: dict[str, Any] = {"plugins": {"load": ["sliced=sliced_planner"]}, "sliced": {"on": True}}


class TestDeclaration(PluginConformance):
    entry_point = "ds_plan.plugin"


@pytest.fixture(autouse=True)
def _beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sliced_planner.py").write_text(SLICED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)


def plan(config: dict[str, Any]) -> Any:
    Path("c.json").write_text(json.dumps(config))
    words = ["plan", "--world", "4", "--params", "1M", "--config", "c.json", "--import"]
    return CliRunner().invoke(make_app(), [*words, "--json"])


def test_a_planner_adds_its_rows_and_leaves_keys_out() -> None:
    done = plan({**CONFIG, "only_in_a_run": True})
    assert done.exit_code == 0, done.stderr
    rows = json.loads(done.stdout)["choices"]
    assert [row["device_peak"] for row in rows if row["stage"] == 7] == [2_000_000]
    # dscore-zero's rows are there where it is installed; this package alone has no planner.
    zero = {0, 1, 2, 3} if importlib.util.find_spec("ds_zero") else set()
    assert {row["stage"] for row in rows} == {7, *zero}


def test_without_a_planner_the_error_says_what_to_install() -> None:
    done = plan({"plugins": {"disable": ["dscore-zero"]}})
    assert done.exit_code == 2
    assert "no plugin predicts memory (hook ds_planners); install dscore-zero" in done.stderr


def test_a_planner_that_cannot_be_loaded_is_named() -> None:
    text = "def ds_planners(): return {'lost': 'nowhere_at_all:Planner'}"
    Path("lost_planner.py").write_text(text)
    done = plan({"plugins": {"load": ["lost_planner"]}})
    assert done.exit_code == 1
    assert "lost_planner" in done.stderr and "nowhere_at_all" in done.stderr
