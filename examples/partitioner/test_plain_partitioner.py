"""The example passes the kit that every partitioner must pass, and its checkpoints are the core's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ds_testing import run_ranks
from ds_testing.partitioner import PartitionerConformance

HERE = str(Path(__file__).parent)
LOAD = {"plain": {}, "plugins": {"load": ["plain=plain_partitioner"]}}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)


def _prepare(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


@pytest.mark.usefixtures("_workers_find_it")
@pytest.mark.slow
class TestPlain(PartitionerConformance):
    config: ClassVar[Mapping[str, Any]] = {"plain": {}}
    load: ClassVar[tuple[str, ...]] = ("plain=plain_partitioner",)


@pytest.fixture(scope="module")
def _workers_find_it() -> None:
    for world in (1, 2, 4):
        run_ranks(world, _prepare, HERE)


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


@pytest.mark.usefixtures("_workers_find_it")
@pytest.mark.parametrize(("saver", "loader"), [(LOAD, LOAD), (LOAD, {}), ({}, LOAD)])
def test_checkpoints_are_exchanged_with_the_cores(saver: Any, loader: Any, tmp_path: Path) -> None:
    whole = run_ranks(2, _train, str(tmp_path), saver, False)
    resumed = run_ranks(2, _train, str(tmp_path), loader, True)
    assert [r[2:] for r in whole] == resumed
