"""The checkpoints of the template for partitioners are the core's; its kit is run with those of all
kinds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ds_new.naming import forms_of
from ds_new.rendering import render
from ds_testing import run_ranks

LOAD = {"plain_states": {}, "plugins": {"load": ["plain_states=plain_states.plugin"]}}


@pytest.fixture(autouse=True)
def _as_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, text in render("partitioner", forms_of("plain-states")).items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))


def _train(folder: str, config: dict[str, Any], load: bool) -> list[float]:
    import torch

    import ds_core

    torch.manual_seed(0)
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    }
    engine, *_ = ds_core.initialize(model=torch.nn.Linear(3, 2), config={**base, **config})
    if load:
        engine.load_checkpoint(folder)
    losses = []
    for step in range(2, 4) if load else range(4):
        generator = torch.Generator().manual_seed(10 * step + engine.global_rank)
        x = torch.randn(2, 3, generator=generator).bfloat16()
        loss = engine(x).float().square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
        if step == 1 and not load:
            engine.save_checkpoint(folder)
    engine.destroy()
    return losses


@pytest.mark.fast_cases("saver2-loader2")
@pytest.mark.parametrize(("saver", "loader"), [(LOAD, LOAD), (LOAD, {}), ({}, LOAD)])
def test_checkpoints_are_exchanged_with_the_cores(saver: Any, loader: Any, tmp_path: Path) -> None:
    whole = run_ranks(2, _train, str(tmp_path / "saved"), saver, False)
    resumed = run_ranks(2, _train, str(tmp_path / "saved"), loader, True)
    assert [r[2:] for r in whole] == resumed
