"""Plugins of third parties that change gradients, observe, and ask all ranks to stop; each is one
small module.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ds_testing import (
    CombinationConformance,
    EngineMethodsConformance,
    GradientsConformance,
    ObserverConformance,
    run_ranks,
)

import ds_core

HERE = Path(__file__).parent
PLATEAU = {"plugins": {"load": ["stop_on_plateau=stop_on_plateau"]}}


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))


@pytest.mark.parametrize("file", ["gradient_noise.py", "stop_on_plateau.py", "flight_recorder.py"])
def test_they_are_small(file: str) -> None:
    assert len((HERE / file).read_text().splitlines()) <= 80


class TestNoiseInEveryLayout(CombinationConformance):
    values: ClassVar = {
        "little": {"gradient_noise": {"std": 0.02}},
        "much": {"gradient_noise": {"std": 1.0, "seed": 1}},
    }
    load = ("gradient_noise=gradient_noise",)


class TestNoise(GradientsConformance):
    config: ClassVar = {"gradient_noise": {"std": 0.02}}
    load = ("gradient_noise=gradient_noise",)
    partitioners: ClassVar = {f"stage {s}": {"zero_optimization": {"stage": s}} for s in (1, 2, 3)}


class TestRecorder(ObserverConformance):
    config: ClassVar = {"flight_recorder": {"events": 3}}
    load = ("flight_recorder=flight_recorder",)


class TestRecorderNowAndThen(ObserverConformance):
    config: ClassVar = {"flight_recorder": {"every": 3}}
    load = ("flight_recorder=flight_recorder",)


class TestRecorderMethods(EngineMethodsConformance):
    config: ClassVar = {"flight_recorder": {}}
    load = ("flight_recorder=flight_recorder",)
    names = ("last_events",)


class TestPlateau(ObserverConformance):
    config: ClassVar = {"stop_on_plateau": {"patience": 2}}
    load = ("stop_on_plateau=stop_on_plateau",)


def _until_stopped(folder: str) -> Any:
    """The loss of rank 1 falls, that of rank 0 does not: rank 0 asks, and all save and stop."""
    from ds_core import comm

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "stop_on_plateau": {"patience": 3, "folder": folder},
        **PLATEAU,
    }
    engine, *_ = ds_core.initialize(model=torch.nn.Linear(2, 1), config=config)
    while not engine.should_stop:
        loss = engine(torch.ones(1, 2)).sum() * (0.0 if comm.rank() == 0 else 1.0)
        engine.backward(loss)
        engine.step()
    steps = engine.global_steps
    engine.global_steps = 0
    path, _ = engine.load_checkpoint(folder)
    found = [steps, engine.global_steps, Path(str(path)).name]
    engine.destroy()
    return found


def test_one_rank_asks_and_all_save_and_stop_in_the_same_step(tmp_path: Path) -> None:
    assert run_ranks(2, _until_stopped, str(tmp_path)) == [[4, 4, "global_step4"]] * 2


def test_the_recorder_sees_all_of_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = {
        "train_batch_size": 1,
        "flight_recorder": {},
        "plugins": {"load": ["flight_recorder=flight_recorder"]},
    }
    engine, *_ = ds_core.initialize(
        model=torch.nn.Linear(2, 1),
        config=config | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )
    with pytest.raises(ZeroDivisionError), contextlib.ExitStack() as stack:
        stack.callback(engine.destroy)
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        engine.save_checkpoint(str(tmp_path))
        engine.eval_batch(iter([torch.ones(1, 2)]), reduce_output=None)
        events = engine.last_events()
        raise ZeroDivisionError
    phases = (
        "forward begins, forward ends, backward begins, backward_inner begins, "
        "backward_inner "
        "ends, "
    )
    phases += (
        "backward_allreduce begins, backward_allreduce ends, backward ends, step begins, "
        "step "
        "ends, saved global_step1"
    )
    assert ", ".join(events).startswith(phases)
    assert f"rank 0: {', '.join(events)}, ZeroDivisionError" in capfd.readouterr().err
