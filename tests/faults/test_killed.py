"""All ranks are killed at random moments while they save; what loads afterwards is whole, right and
not too old.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing import RemoteError
from torch import nn

import ds_core
from ds_core import comm

SHORT = 6
FULL = 60


def make(asynchronous: bool) -> Any:
    config = {
        "train_batch_size": comm.world_size(),
        "optimizer": {"type": "AdamW"},
        "checkpoint": {"async": asynchronous},
    }
    engine, *_ = ds_core.initialize(model=nn.Linear(700, 500), config=config)
    engine.backward(engine(torch.ones(1, 700)).sum())
    engine.step()
    return engine


def fill(engine: Any, value: int) -> None:
    with torch.no_grad():
        for p in engine.module.parameters():
            p.fill_(value)
            engine.optimizer.state[p]["exp_avg"].fill_(value + 0.5)
    engine.global_steps = value


def save_until_killed(folder: str, kind: str, delay: float, apart: float) -> None:
    """Save one after the other; `delay` seconds after the first is done, die (the second rank a
    little later).
    """
    engine = make("background" in kind)
    same = "same" in kind
    value = int(float(Path(folder, "done").read_text())) if Path(folder, "done").exists() else 0
    for count in range(1000):
        value += 1
        fill(engine, value)
        engine.save_checkpoint(
            folder, "same" if same else f"step{value}", client_state={"value": value}
        )
        if "background" in kind:
            engine.wait_for_checkpoint()
        if comm.rank() == 0:
            Path(folder, "done.new").write_text(str(value))
            os.replace(Path(folder, "done.new"), Path(folder, "done"))
        if count == 0:
            later = delay + apart * comm.rank()
            threading.Thread(
                target=lambda s=later: (time.sleep(s), os.kill(os.getpid(), signal.SIGKILL))
            ).start()


def load_and_check(folder: str) -> int:
    engine = make(False)
    _, client = engine.load_checkpoint(folder)
    value = int(client["value"])
    assert engine.global_steps == value
    for p in engine.module.parameters():
        assert p.eq(value).all(), (
            f"weights of {p.unique().tolist()[:3]} in the checkpoint of {value}"
        )
        assert engine.optimizer.state[p]["exp_avg"].eq(value + 0.5).all()
    return value


def trials(ranks: Any, folder: Path, kind: str, count: int) -> None:
    chance = random.Random(f"{kind} {count}")
    interrupted = 0
    for trial in range(count):
        delay = chance.uniform(0, 0.06)
        apart = chance.choice([0.0, 0.0, 0.01, -0.01])
        with pytest.raises(RemoteError):
            ranks(2, save_until_killed, str(folder), kind, max(delay, 0.011), apart)
        interrupted += any(p.name.startswith(".tmp-") for p in folder.iterdir())
        done = int((folder / "done").read_text())
        for value in ranks(2, load_and_check, str(folder)):
            assert done <= value <= done + 1, f"trial {trial}: {value} loads, {done} had been saved"
        left = [p.name for p in folder.iterdir() if p.name.startswith(".old-")]
        assert len(left) <= 1
    assert interrupted >= count // 5, (
        "too few were killed in the middle of a save for this to prove anything"
    )


KINDS = ["new tags", "same tag", "new tags in the background", "same tag in the background"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[2:3])
def test_killed_while_saving(ranks: Any, tmp_path: Path, kind: str) -> None:
    trials(ranks, tmp_path, kind, SHORT)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
def test_killed_while_saving_many_times(ranks: Any, tmp_path: Path, kind: str) -> None:
    trials(ranks, tmp_path, kind, FULL)
