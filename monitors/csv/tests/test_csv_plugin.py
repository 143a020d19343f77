"""The declaration and the section of the CSV monitor."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ds_monitor_csv.config import CSVConfig
from ds_monitor_csv.plugin import ds_monitors
from ds_testing import PluginConformance

from ds_core.config import build_config
from ds_core.entries import Event
from ds_core.plugins import Plugins
from ds_core.plugins.registry import PluginSettings


class TestPlugin(PluginConformance):
    entry_point = "ds_monitor_csv.plugin"
    section = "csv_monitor"
    good_config: ClassVar[Any] = {"enabled": True, "output_path": "runs", "job_name": "team/run 1"}
    bad_configs: ClassVar[Any] = [{"enabled": 1}, {"output_path": "a\0b"}, {"job_name": "../up"}]


def context(section: CSVConfig | None) -> Any:
    return SimpleNamespace(config=SimpleNamespace(section=lambda model: section))


def test_the_defaults_of_the_documents() -> None:
    assert CSVConfig().model_dump() == {
        "enabled": False,
        "output_path": "",
        "job_name": "DeepSpeedJobName",
    }


@pytest.mark.parametrize("section", [None, CSVConfig(), CSVConfig(enabled=False, output_path="x")])
def test_no_monitor_unless_enabled(section: CSVConfig | None) -> None:
    assert list(ds_monitors(context(section))) == []


def test_an_empty_output_path_is_the_launch_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = tmp_path / "launched"
    later = tmp_path / "later"
    launched.mkdir()
    later.mkdir()
    monkeypatch.chdir(launched)
    (monitor,) = ds_monitors(context(CSVConfig(enabled=True)))
    monkeypatch.chdir(later)
    monitor.write_events([Event("loss", 1.0, 1)])
    monitor.close()
    assert list(later.iterdir()) == []
    assert (launched / "DeepSpeedJobName" / "loss.csv").exists()


def test_the_core_builds_it_from_a_config(tmp_path: Path) -> None:
    plugins = Plugins(PluginSettings(load=["csv_monitor=ds_monitor_csv.plugin"]), found=())
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    models = {"csv_monitor": (CSVConfig, "dscore-monitor-csv 0.1.0")}
    config = build_config({"train_batch_size": 4, "csv_monitor": section}, models)
    (answer,) = plugins.ask("ds_monitors", ctx=SimpleNamespace(config=config))
    (monitor,) = answer.value
    monitor.write_events([Event("Train/loss", 1.5, 4)])
    monitor.close()
    assert (tmp_path / "job" / "Train_loss.csv").read_text() == "step,loss\n4,1.5\n"
