"""A resumed run is the run that was never interrupted, bit for bit; and the arguments of save and
load."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from checkpoint_runs import MODES, ZERO, everything, first_life, first_life_short, losses_of, make
from ds_run_state import RunState


def assert_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a["states"].keys() == b["states"].keys()
    for name, tensor in a["states"].items():
        assert torch.equal(tensor, b["states"][name]), name
    assert (a["draws"], a["run"], a["calls"]) == (b["draws"], b["run"], b["calls"])


def second_life(folder: str, mode: str, steps: int = 5) -> Any:
    engine = make(mode, seed=99)
    losses_of(engine, 2)  # whatever was there before must not shine through
    path, client = engine.load_checkpoint(folder)
    assert path == str(Path(folder) / "global_step3") and client == {"epoch": 1}
    del engine.batches
    return losses_of(engine, steps), everything(engine)


@pytest.mark.fast_cases("fp16-2", "fp16 stage 3-2")
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("mode", [*MODES, *ZERO])
def test_resume_is_bit_identical(ranks: Any, tmp_path: Path, mode: str, world: int) -> None:
    whole = ranks(world, first_life, str(tmp_path), mode)
    resumed = ranks(world, second_life, str(tmp_path), mode)
    for (losses, end), (losses_again, end_again) in zip(whole, resumed, strict=True):
        assert losses == losses_again
        assert_equal(end, end_again)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "global_step3", "latest"]


def both_lives_at_step_0(folder: str) -> Any:
    engine = make()
    engine.save_checkpoint(folder)
    before = losses_of(engine, 2)
    engine.load_checkpoint(folder)
    del engine.batches
    return before, losses_of(engine, 2)


def test_going_back_to_before_the_first_step_in_the_same_engine(ranks: Any, tmp_path: Path) -> None:
    [(before, again)] = ranks(1, both_lives_at_step_0, str(tmp_path))
    assert before == again


def memory_after_loading(folder: str, mode: str) -> Any:
    engine = make(mode)
    losses_of(engine, 1)
    engine.save_checkpoint(folder)
    losses_of(engine, 1)
    before = {s.name: s.tensor.data_ptr() for s in RunState(engine).states(engine.optimizer)}
    engine.load_checkpoint(folder)
    after = {s.name: s.tensor for s in RunState(engine).states(engine.optimizer)}
    moved = [name for name, tensor in after.items() if tensor.data_ptr() != before[name]]
    return moved, all(t.untyped_storage().resizable() for t in after.values())


@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_states_are_read_into_the_memory_that_they_have(
    ranks: Any, tmp_path: Path, mode: str
) -> None:
    assert ranks(2, memory_after_loading, str(tmp_path), mode) == [([], True)] * 2


def states_now(folder: str | None, mode: str = "fp32") -> Any:
    engine = make(mode, seed=5)
    if folder is None:
        losses_of(engine, 3)
        return everything(engine)
    engine.load_checkpoint(folder)
    return everything(engine)


@pytest.mark.fast_cases("worlds0", "worlds1")
@pytest.mark.parametrize("worlds", [(2, 1), (1, 2), (2, 3)])
def test_another_world_size(ranks: Any, tmp_path: Path, worlds: tuple[int, int]) -> None:
    saved = ranks(worlds[0], first_life_short, str(tmp_path))
    loaded = ranks(worlds[1], states_now, str(tmp_path))
    data = {json.loads(end["run"])["data"]["samples"] for end in loaded}
    assert len(data) == 1 and data.pop() <= json.loads(saved[0]["run"])["data"]["samples"]
    for rank, end in enumerate(loaded):
        like = saved[rank if rank < worlds[0] else 0]  # running statistics are each rank's own
        for name, tensor in like["states"].items():
            assert torch.equal(tensor, end["states"][name]), name
        if rank < worlds[0]:
            assert end["draws"] == saved[rank]["draws"]
    new = [end["draws"] for end in loaded[worlds[0] :]]
    assert all(draws not in [s["draws"] for s in saved] for draws in new)
