"""The section ``memory_snapshot``: one file per rank, the allocator's history where there is one,
out of memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from ds_step_log.held import held_by_kind
from ds_testing import PluginConformance

import ds_core
from ds_core.errors import PluginError


class TestPlugin(PluginConformance):
    entry_point = "ds_step_log.plugin"
    section = "memory_snapshot"
    good_config: ClassVar[Any] = {"enabled": True, "folder": "there", "step": 1, "history": False}
    bad_configs: ClassVar[Any] = [{"step": 0}, {"max_entries": 0}, {"folder": ""}, {"enabled": 1}]


def started(folder: Path, **section: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "memory_snapshot": {"enabled": True, "folder": str(folder), **section},
    }
    return ds_core.initialize(model=torch.nn.Linear(300, 10, bias=False), config=config)[0]


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(2, 300)).square().mean())
    engine.step()


@pytest.mark.slow
@pytest.mark.usefixtures("clean_ds")
def test_the_chosen_step_is_written(tmp_path: Path) -> None:
    engine = started(tmp_path / "memory")
    step(engine)
    assert not (tmp_path / "memory").exists()
    step(engine)
    step(engine)
    (file,) = (tmp_path / "memory").iterdir()
    data = json.loads(file.read_text())
    assert (file.name, data["step"], data["device"], data["world"]) == ("rank0.json", 2, "cpu", 1)
    held = data["kinds"]["device"]
    assert (held["parameters"], held["gradients"], held["masters"]) == (12000, 12000, 0)
    assert 24000 <= held["states"] <= 24100
    assert set(data["phases"]) == {
        "forward",
        "backward",
        "backward_inner",
        "backward_allreduce",
        "step",
    }
    assert all(used["peak"] >= used["in_use"] > 2**20 for used in data["phases"].values())
    engine.destroy()


@pytest.mark.usefixtures("clean_ds")
@pytest.mark.slow
def test_what_the_program_keeps_is_other_memory(tmp_path: Path) -> None:
    engine = started(tmp_path)
    before = held_by_kind(engine)["device"]
    kept = torch.ones(1000), torch.ones(2000)
    views = [kept[0][5:], kept[0].view(10, 100)]
    after = held_by_kind(engine)["device"]
    assert after["other"] - before["other"] == 12000, "a storage counts once"
    assert len(views) == 2
    engine.destroy()


@pytest.mark.usefixtures("clean_ds")
def test_a_device_without_history_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        PluginError, match=r"memory_snapshot.history: torch keeps no history of the memory of 'cpu'"
    ):
        started(tmp_path, history=True)


@pytest.mark.usefixtures("clean_ds")
def test_history_and_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The history is recorded from the start, written with a snapshot or when memory runs out, and
    then ended.
    """
    calls: list[Any] = []
    memory = SimpleNamespace(
        _record_memory_history=lambda enabled="all", **more: calls.append((enabled, more)),
        _dump_snapshot=lambda path: calls.append(Path(path).name),
    )
    monkeypatch.setattr(torch.cpu, "memory", memory, raising=False)
    engine = started(tmp_path / "a", history=True, max_entries=7, step=1)
    step(engine)
    assert calls == [("all", {"max_entries": 7}), "rank0.pickle", (None, {})]
    engine.destroy()
    ds_core.reset()
    calls.clear()
    engine = started(tmp_path / "b", history=True)
    try:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")
    except torch.OutOfMemoryError:
        engine.destroy()
    assert calls == [("all", {"max_entries": 100_000}), "rank0-oom.pickle", (None, {})]
    assert (
        json.loads((tmp_path / "b" / "rank0-oom.json").read_text())["error"]
        == "tried to allocate 3 GiB"
    )
