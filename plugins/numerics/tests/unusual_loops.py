"""Loops with more in a step than its micro-batches, for the tests of dscore-numerics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import replayed_runs
import torch
from ds_testing.truth import start, whole_weights
from replayed_runs import ADAM, Net, batches, loss_of
from torch import nn


def interrupted(numerics: dict[str, Any], folder: str) -> dict[str, Any]:
    """Evaluations between micro-batches, and a checkpoint that is loaded in the middle of a step."""
    engine = start(Net(), optimizer=ADAM, gas=2, zero_optimization={"stage": 2}, **numerics)
    for step in range(5):
        for micro in range(2):
            engine.eval_batch(iter([batches(50, 0), batches(51, 0)]))
            engine.eval()
            with torch.no_grad():
                engine(batches(60, 1))
            engine.train()
            engine.backward(loss_of(engine, batches(step, micro)))
            engine.step()
        if step == 1:
            engine.save_checkpoint(folder, tag="second")
        if step == 2:
            engine.backward(loss_of(engine, batches(9, 0)))
            engine.load_checkpoint(folder, tag="second")
    found = whole_weights(engine)
    engine.destroy()
    return found


def joint(numerics: dict[str, Any], folder: str) -> dict[str, Any]:
    """One loss of two engines."""
    first = start(nn.Linear(4, 4), optimizer=ADAM, **numerics)
    second = start(nn.Linear(4, 4), optimizer=ADAM, **numerics)
    for step in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        first.backward(second(first(x)).square().mean())
        first.step()
        second.step()
    found = {f"first {n}": v for n, v in whole_weights(first).items()}
    found |= {f"second {n}": v for n, v in whole_weights(second).items()}
    first.destroy()
    second.destroy()
    return found


def in_place(numerics: dict[str, Any], folder: str) -> dict[str, Any]:
    """What the model gives is multiplied in place, as transformers' Trainer does with its loss."""
    engine = start(nn.Linear(4, 4), optimizer=ADAM, **numerics)
    for step in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(step))
        out = engine(x)
        out *= 2
        engine.backward(out.square().mean())
        engine.step()
    found = whole_weights(engine)
    engine.destroy()
    return found


LOOPS: dict[str, Callable[[dict[str, Any], str], dict[str, Any]]] = {
    "interrupted": interrupted,
    "joint": joint,
    "in place": in_place,
}


def compared(loop: str, folder: str) -> tuple[bool, int, list[str]]:
    """Whether weights are the same with and without replays, how many there were, and the log."""
    torch.manual_seed(0)
    wanted = LOOPS[loop]({}, str(Path(folder) / "without"))
    said = replayed_runs.lines_of_numerics()
    replays = replayed_runs.count_replays()
    torch.manual_seed(0)
    found = LOOPS[loop]({"numerics": {"every": 1}}, str(Path(folder) / "with"))
    return all(torch.equal(found[n], v) for n, v in wanted.items()), replays[0], said.lines
