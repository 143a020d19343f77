"""The declaration and the section of the TensorBoard monitor, with and without the package
tensorboard.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ds_monitor_tensorboard.config import TensorBoardConfig
from ds_monitor_tensorboard.plugin import ds_check, ds_monitors
from ds_testing import PluginConformance
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ds_core.config import build_config
from ds_core.entries import Event
from ds_core.plugins import Plugins
from ds_core.plugins.registry import PluginSettings


class TestPlugin(PluginConformance):
    entry_point = "ds_monitor_tensorboard.plugin"
    section = "tensorboard"
    good_config: ClassVar[Any] = {"enabled": True, "output_path": "runs", "job_name": "team/run 1"}
    bad_configs: ClassVar[Any] = [{"enabled": 1}, {"output_path": "a\0b"}, {"job_name": "../up"}]


def context(section: TensorBoardConfig | None) -> Any:
    config = SimpleNamespace(section={"tensorboard": section}.get, redacted=dict)
    return SimpleNamespace(config=config)


def test_the_defaults_of_the_documents() -> None:
    assert TensorBoardConfig().model_dump() == {
        "enabled": False,
        "output_path": "",
        "job_name": "DeepSpeedJobName",
    }


@pytest.mark.parametrize(
    "section", [None, TensorBoardConfig(), TensorBoardConfig(enabled=False, output_path="x")]
)
def test_no_monitor_unless_enabled(section: TensorBoardConfig | None) -> None:
    assert list(ds_monitors(context(section))) == []
    assert list(ds_check(context(section).config)) == []


def test_an_empty_output_path_is_the_launch_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = tmp_path / "launched"
    later = tmp_path / "later"
    launched.mkdir()
    later.mkdir()
    monkeypatch.chdir(launched)
    (monitor,) = ds_monitors(context(TensorBoardConfig(enabled=True)))
    monkeypatch.chdir(later)
    monitor.write_events([Event("loss", 1.0, 1)])
    monitor.close()
    assert list(later.iterdir()) == []
    assert len(list((launched / "DeepSpeedJobName").iterdir())) == 1


def test_the_core_builds_it_from_a_config(tmp_path: Path) -> None:
    plugins = Plugins(PluginSettings(load=["tensorboard=ds_monitor_tensorboard.plugin"]), found=())
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    models = {"tensorboard": (TensorBoardConfig, "dscore-monitor-tensorboard 0.1.0")}
    config = build_config({"train_batch_size": 4, "tensorboard": section}, models)
    assert [list(answer.value) for answer in plugins.ask("ds_check", config=config)] == [[]]
    (answer,) = plugins.ask("ds_monitors", ctx=SimpleNamespace(config=config))
    (monitor,) = answer.value
    monitor.write_events([Event("Train/loss", 1.5, 4)])
    monitor.close()
    reader = EventAccumulator(str(tmp_path / "job"))
    reader.Reload()
    assert [(e.value, e.step) for e in reader.Scalars("Train/loss")] == [(1.5, 4)]


# -- without the package ---------------------------------------------------------------------------

ASK = """
import json, sys
from types import SimpleNamespace
if sys.argv[1] == "hidden":
    sys.modules["tensorboard"] = None  # what Python then finds is what it finds where nothing is installed
from ds_core.errors import PluginError
from ds_monitor_tensorboard.config import TensorBoardConfig
from ds_monitor_tensorboard.plugin import ds_check, ds_monitors
for enabled in (False, True):
    config = SimpleNamespace(section={"tensorboard": TensorBoardConfig(enabled=enabled)}.get)
    try:
        made = str(ds_monitors(SimpleNamespace(config=config)))
    except PluginError as error:
        made = str(error)
    print(json.dumps([[str(p) for p in ds_check(config)], made]))
"""


def ask_in_a_new_process(how: str, *first_on_path: Path) -> list[list[Any]]:
    path = os.pathsep.join([*map(str, first_on_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", ASK, how],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_missing_package_matters_only_when_enabled() -> None:
    off, on = ask_in_a_new_process("hidden")
    assert off == [[], "[]"]
    assert on[0] == [
        "tensorboard.enabled: the package tensorboard is not installed; pip install tensorboard"
    ]
    assert on[1].startswith(
        "the section tensorboard is enabled, but the package tensorboard cannot be imported ("
    )
    assert "pip install tensorboard" in on[1]


def test_a_broken_package_is_named_with_its_cause(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").write_text(
        "raise ImportError('its protobuf is too old')"
    )
    off, on = ask_in_a_new_process("shown", tmp_path)
    assert off == [[], "[]"]
    assert "cannot be imported (its protobuf is too old); pip install tensorboard" in on[1]


def test_a_folder_of_that_name_is_not_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tensorboard").mkdir()  # where many keep their logs
    found = importlib.machinery.PathFinder.find_spec("tensorboard", [str(tmp_path)])
    assert found is not None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    (problem,) = ds_check(context(TensorBoardConfig(enabled=True)).config)
    assert problem.path == "tensorboard.enabled"
