"""Saving while training goes on, checksums, and falling back to a checkpoint that is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_checkpoint import background
from ds_checkpoint.folder import tensorfile, writing
from torch import nn

import ds_core
from ds_core import comm
from ds_core.errors import CheckpointError

ASYNC = {"checkpoint": {"async": True}}


def make(value: float, **config: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(300, 200)
    full = {
        "train_batch_size": comm.world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    } | config
    engine, *_ = ds_core.initialize(model=model, config=full)
    with torch.no_grad():
        model.weight.fill_(value)
        model.bias.fill_(value)
    return engine


def make_steps(engine: Any, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(
            2, 300, generator=torch.Generator().manual_seed(7 * engine.global_steps + step)
        )
        engine.backward(engine(x).square().mean())
        engine.step()


def weights(engine: Any) -> list[float]:
    return [engine.module.weight.double().sum().item(), engine.module.bias.double().sum().item()]


def train_while_saving(folder: str) -> bool:
    """The states are those at the call, whatever training does to them before they are written."""
    gate = threading.Event()
    real = writing.write
    background.write = lambda *args: gate.wait(20) and real(*args)  # type: ignore[assignment]
    try:
        engine = make(1.0, **ASYNC)
        make_steps(engine, 2)
        engine.save_checkpoint(folder, "a", client_state={"at": torch.tensor([1.0])})
        saved = weights(engine)
        assert not (Path(folder) / "a").exists()
        make_steps(engine, 2)
        after = weights(engine)
        gate.set()
        engine.wait_for_checkpoint()
    finally:
        background.write = real
    other = make(-1.0)
    _, client = other.load_checkpoint(folder)
    assert client["at"].item() == 1.0 and other.global_steps == 2
    assert weights(other) == saved != after
    make_steps(other, 2)
    return weights(other) == after


@pytest.mark.parametrize("world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4))])
def test_a_save_in_the_background_is_of_the_moment_it_was_asked_for(
    ranks: Any, tmp_path: Path, world: int
) -> None:
    assert all(ranks(world, train_while_saving, str(tmp_path)))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "a", "latest"]
    assert not list((tmp_path / "a").glob("*.report"))


def one_at_a_time(folder: str) -> list[str]:
    engine = make(1.0, **ASYNC)
    for tag in "abc":
        engine.save_checkpoint(folder, tag)
        make_steps(engine, 1)
    engine.destroy()
    return sorted(p.name for p in Path(folder).iterdir())


def test_several_saves_and_the_last_is_waited_for(ranks: Any, tmp_path: Path) -> None:
    assert ranks(2, one_at_a_time, str(tmp_path)) == [[".lock", "a", "b", "c", "latest"]] * 2


def failing(folder: str, bad: int, call: str, reports: bool) -> str:
    """One rank cannot write (nor even leave a report); the next call says so on all ranks."""
    real = tensorfile.write_tensors, background._leave_report

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    if comm.rank() == bad:
        tensorfile.write_tensors = full  # type: ignore[assignment]
        if not reports:
            background._leave_report = full
    try:
        engine = make(1.0, **ASYNC)
        engine.save_checkpoint(folder, "bad")
        with pytest.raises(CheckpointError) as caught:
            {
                "save": lambda: engine.save_checkpoint(folder, "next"),
                "wait": engine.wait_for_checkpoint,
            }[call]()
    finally:
        tensorfile.write_tensors, background._leave_report = real
    engine.save_checkpoint(folder, "good")
    engine.wait_for_checkpoint()
    return str(caught.value)


@pytest.mark.fast_cases("0-wait-False", "1-save-True", "1-save-False")
@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("call", ["save", "wait"])
@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_in_the_background_is_raised_by_the_next_call(
    ranks: Any, tmp_path: Path, bad: int, call: str, reports: bool
) -> None:
    for message in ranks(2, failing, str(tmp_path), bad, call, reports):
        assert f"rank {bad}: " in message
        assert "No space left" in message
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "good", "latest"]


ENDS = """
import sys, torch, ds_core
engine, *_ = ds_core.initialize(model=torch.nn.Linear(2000, 2000), config={
    "train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "checkpoint": {"async": True}})
engine.save_checkpoint(sys.argv[1], "last")
"""


@pytest.mark.slow
def test_the_end_of_the_process_waits(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path)], check=True, timeout=300)
    assert (tmp_path / "latest").read_text() == "last"
    assert (tmp_path / "last" / "manifest.json").is_file()


# -- every file, every kind of damage --------------------------------------------------------------


def save_two(folder: str) -> None:
    engine = make(1.0)
    make_steps(engine, 1)
    engine.save_checkpoint(folder, "old", client_state={"t": torch.ones(3)})
    make_steps(engine, 1)
    engine.save_checkpoint(folder, "new", client_state={"t": torch.ones(3)})


def load(folder: str, fallback: bool = False, verify: bool = True) -> Any:
    engine = make(-1.0, checkpoint={"verify": verify})
    before = weights(engine)
    try:
        path, _ = engine.load_checkpoint(folder, fallback=fallback)
    except CheckpointError as error:
        assert weights(engine) == before and engine.global_steps == 0 and not engine.optimizer.state
        return str(error)
    return [Path(path).name, engine.global_steps]


class Planted:
    """What a pickle can be: a command that is run by whoever loads it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def damage(kind: str, path: Path) -> None:
    data = path.read_bytes()
    if kind == "flip":  # in the middle of the data
        place = len(data) * 3 // 4
        path.write_bytes(data[:place] + bytes([data[place] ^ 16]) + data[place + 1 :])
    elif kind == "truncate":
        path.write_bytes(data[:-3])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "delete":
        path.unlink()
    elif kind == "older":
        path.write_bytes((path.parent.parent / "old" / path.name).read_bytes())
    elif kind == "pickle":
        import pickle

        path.write_bytes(pickle.dumps(Planted(path.parent.parent / "planted")))


FILES = ["manifest.json", "common.safetensors"] + [
    f"rank0000{r}{x}.safetensors" for r in (0, 1) for x in ("", "-local")
]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flip", "truncate", "empty", "delete", "older", "pickle"])
@pytest.mark.parametrize("name", FILES)
def test_every_damage_to_every_file_is_told_and_can_be_got_around(
    ranks: Any, tmp_path: Path, name: str, kind: str
) -> None:
    ranks(2, save_two, str(tmp_path))
    damage(kind, tmp_path / "new" / name)
    for answer in ranks(2, load, str(tmp_path)):
        if kind == "older" and name == "manifest.json":
            assert "rank00000" in answer and "not of this checkpoint" in answer
        else:
            assert name in answer
    assert ranks(2, load, str(tmp_path), True) == [["old", 1]] * 2
    assert not (tmp_path / "planted").exists()


def test_swapped_shards(ranks: Any, tmp_path: Path) -> None:
    ranks(2, save_two, str(tmp_path))
    one, two = (tmp_path / "new" / f"rank0000{r}.safetensors" for r in (0, 1))
    os.replace(one, tmp_path / "x")
    os.replace(two, one)
    os.replace(tmp_path / "x", two)
    for answer in ranks(2, load, str(tmp_path)):
        assert "rank0000" in answer and "safetensors" in answer


def test_verification_can_be_turned_off(ranks: Any, tmp_path: Path) -> None:
    ranks(2, save_two, str(tmp_path))
    damage("flip", tmp_path / "new" / "rank00001.safetensors")
    assert ranks(2, load, str(tmp_path), False, False) == [["new", 2]] * 2


def test_nothing_to_fall_back_to(ranks: Any, tmp_path: Path) -> None:
    ranks(2, save_two, str(tmp_path))
    for tag in ("old", "new"):
        damage("truncate", tmp_path / tag / "rank00000.safetensors")
    for answer in ranks(2, load, str(tmp_path), True):
        assert "new" in answer and "rank00000.safetensors" in answer


# -- who writes what -------------------------------------------------------------------------------


@pytest.mark.fast_cases("4")
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_share_the_writing(ranks: Any, tmp_path: Path, world: int) -> None:
    ranks(world, save_two, str(tmp_path))
    sizes = [(tmp_path / "new" / f"rank{r:05d}.safetensors").stat().st_size for r in range(world)]
    assert max(sizes) < 1.2 * sum(sizes) / world
    states = json.loads((tmp_path / "new" / "manifest.json").read_text())["states"]
    total = 4 * sum(chunk["stop"] - chunk["start"] for state in states for chunk in state["chunks"])
    assert total <= sum(sizes) < 1.02 * total
    assert ranks(1, load, str(tmp_path)) == [["new", 2]]


def keep_two(folder: str) -> None:
    engine = make(1.0, checkpoint={"keep_last": 2})
    for tag in "abcd":
        engine.save_checkpoint(folder, tag)


def test_only_the_newest_are_kept(ranks: Any, tmp_path: Path) -> None:
    ranks(2, keep_two, str(tmp_path))
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "c", "d", "latest"]
    assert "nothing here is pickled" in (tmp_path / "d" / "README.md").read_text()
