"""Modules that are not installed, named by ``plugins.load``: they drive the partitioner and the
param axes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing.pytest_plugin import Ranks
from torch import nn

import ds_core
from ds_core.errors import ConfigError, PluginError

PARTITIONER = """
from ds_core.partition.replicated import Replicated

class Mine(Replicated):
    pass

def ds_partitioner(ctx):
    return Mine(ctx)
"""
NOT_MINE = "def ds_partitioner(ctx):\n    return None\n"
WRONG = "def ds_partitioner(ctx):\n    return 7\n"
AXES = "def ds_param_axes(name, param):\n    return {'dp'} if name == 'weight' else ()\n"
STRANGE_AXES = "def ds_param_axes(name):\n    return {'elsewhere'} if name == 'weight' else None\n"


def engine_with(folder: Path, monkeypatch: pytest.MonkeyPatch, **modules: str) -> ds_core.Engine:
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(folder))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "plugins": {"load": sorted(modules)},
    }
    return ds_core.initialize(model=nn.Linear(2, 2), config=config)[0]


@pytest.mark.usefixtures("clean_ds")
def test_one_partitioner_drives_and_two_are_an_error_naming_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_with(tmp_path, monkeypatch, drive_a=PARTITIONER, drive_none=NOT_MINE)
    assert type(engine.partitioner).__name__ == "Mine"
    with pytest.raises(PluginError, match=r"ds_partitioner is answered by (?=.*drive_b).*drive_c"):
        engine_with(tmp_path, monkeypatch, drive_b=PARTITIONER, drive_c=PARTITIONER)


@pytest.mark.usefixtures("clean_ds")
def test_a_partitioner_that_is_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        PluginError,
        match=r"drive_wrong.*ds_partitioner: it must return a Partitioner or None, not an int",
    ):
        engine_with(tmp_path, monkeypatch, drive_wrong=WRONG)


def held(folder: str) -> dict[str, list[str]]:
    """On a rank: the axes that each parameter's ranks differ on, as two modules of `folder` answer
    together.
    """
    with pytest.MonkeyPatch.context() as patch:
        own = Path(folder) / str(os.getpid())
        own.mkdir()
        engine = engine_with(
            own, patch, axes_a=AXES, axes_b="def ds_param_axes(name):\n    return ()\n"
        )
        answer = {info.name: list(info.held) for info in engine.ctx.params.values()}
        engine.destroy()
    return answer


def test_param_axes_are_merged_by_union(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks(2, held, str(tmp_path)) == [{"weight": ["dp"], "bias": []}] * 2


@pytest.mark.usefixtures("clean_ds")
def test_an_axis_that_the_mesh_does_not_have_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PluginError, match=r"axes_c.*'weight'.*elsewhere"):
        engine_with(tmp_path, monkeypatch, axes_c=STRANGE_AXES)


SECTION = """
def ds_config():
    from ds_core.config import Section

    class Hello(Section):
        every: int = 10
        loud: bool = False

    return Hello
"""


@pytest.mark.usefixtures("clean_ds")
@pytest.mark.parametrize(
    "given", [None, {"loud": True}, {"every": 3}, {"every": "auto", "loud": True}]
)
def test_a_model_may_ask_for_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    (tmp_path / "asked_mod.py").write_text(SECTION)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = nn.Linear(2, 2)
    model.ds_sections = {"asked": {"every": 3}}  # type: ignore[assignment]
    config = {"train_batch_size": 1, "plugins": {"load": ["asked=asked_mod"]}} | (
        {"asked": given} if given else {}
    )
    engine, *_ = ds_core.initialize(model=model, config=config)
    section = engine.config.section("asked")
    assert (section.every, section.loud) == (3, bool(given and given.get("loud")))
    with pytest.raises(
        ConfigError, match=r"asked\.every: is 5, but the model \(Linear\) was built for 3"
    ):
        ds_core.initialize(model=model, config=config | {"asked": {"every": 5}})


@pytest.mark.usefixtures("clean_ds")
def test_modules_of_a_model_may_ask_for_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asked_too.py").write_text(SECTION)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    for module, wanted in zip(model, ({"every": 3}, {}, {"loud": True}), strict=True):
        module.ds_sections = {"asked": wanted}  # type: ignore[assignment]
    config = {"train_batch_size": 1, "plugins": {"load": ["asked=asked_too"]}}
    engine, *_ = ds_core.initialize(model=model, config=config)
    section = engine.config.section("asked")
    assert (section.every, section.loud) == (3, True)
    model[1].ds_sections = {"asked": {"every": 4}}  # type: ignore[assignment]
    with pytest.raises(
        ConfigError, match=r"asked\.every: is 3, but 1 \(Linear\) was built for 4; .* the same way"
    ):
        ds_core.initialize(model=model, config=config)


@pytest.mark.usefixtures("clean_ds")
def test_a_plugin_may_write_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    told = []

    class Recorder:
        name = "recorder"

        def write_events(self, events: Any) -> None:
            told.extend(tuple(e) for e in events if e.name.startswith("mine/"))

        def flush(self) -> None: ...

        def close(self) -> None: ...

    (tmp_path / "writes_mod.py").write_text(
        SECTION
        + "def ds_step_end(ctx, step, metrics):\n"
        + "    ctx.engine.monitor.write_events([('mine/x', 2.5, int(metrics['samples']))])\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = {"train_batch_size": 4, "plugins": {"load": ["writes=writes_mod"]}, "writes": {}}
    engine, *_ = ds_core.initialize(model=nn.Linear(2, 2), config=config)
    engine.monitor.monitors.append(Recorder())
    engine.backward(engine(torch.ones(4, 2)).sum())
    engine.step()
    assert told == [("mine/x", 2.5, 4)]
