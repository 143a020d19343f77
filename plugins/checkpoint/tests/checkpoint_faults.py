"""A run whose weights all have one value, so that a checkpoint tells which save it is of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from ds_run_state import RunState
from torch import nn

import ds_core
from ds_core import comm
from ds_core.errors import CheckpointError


def make(value: float, **config: Any) -> Any:
    model = nn.Linear(50, 40)
    full = {"train_batch_size": comm.world_size(), "optimizer": {"type": "AdamW"}} | config
    engine, *_ = ds_core.initialize(model=model, config=full)
    fill(engine, value)
    return engine


def fill(engine: Any, value: float) -> None:
    with torch.no_grad():
        engine.module.weight.fill_(value)
        engine.module.bias.fill_(value)


def save(folder: str, value: float, tag: str) -> None:
    make(value).save_checkpoint(folder, tag)


def load(folder: str, tag: str | None = None) -> Any:
    """(path, the one value of all weights) or the error, after which nothing may have changed."""
    engine = make(-1.0)
    torch.manual_seed(5)
    before = json.dumps(RunState(engine).common()), torch.get_rng_state()
    try:
        path, _ = engine.load_checkpoint(folder, tag)
    except CheckpointError as error:
        assert engine.module.weight.eq(-1).all() and engine.module.bias.eq(-1).all()
        assert (json.dumps(RunState(engine).common()), torch.get_rng_state().tolist()) == (
            before[0],
            before[1].tolist(),
        )
        return str(error)
    [value] = {*engine.module.weight.flatten().tolist(), *engine.module.bias.tolist()}
    return [path and Path(path).name, value]
