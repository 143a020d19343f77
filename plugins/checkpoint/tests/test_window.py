"""Checkpoints that are saved in the middle of an accumulation window."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ds_core


class _Numbered(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sample i is named by its last element."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, generator=generator, dtype=torch.float64), torch.tensor(
            [float(index)]
        ).double()


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 1).double()
        self.seen: list[float] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen += y.flatten().tolist()
        return (self.layer(x) - y / 64).square().mean()


def _engine(gas: int, stage: int) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    }
    return ds_core.initialize(model=_Net(), config=config, training_data=_Numbered())[0]


def _backward(engine: Any, plain: bool) -> None:
    loss = engine(*next(engine.batches))
    if plain:
        loss.backward()
    else:
        engine.backward(loss)


def _train(engine: Any, micros: int, plain: bool) -> None:
    engine.batches = (
        engine.batches if hasattr(engine, "batches") else iter(engine.training_dataloader)
    )
    for _ in range(micros):
        _backward(engine, plain)
        engine.step()


def _resumed(
    folder: str, gas: int, stage: int, plain: bool
) -> tuple[float, list[float], list[float]]:
    """Saved in the third window and resumed, against a run that went on: weights, and the samples
    from there on.
    """
    truth = _engine(gas, stage)
    _train(truth, 4 * gas, plain)
    engine = _engine(gas, stage)
    _train(engine, 3 * gas - 1, plain)
    _backward(engine, plain)  # the last one of the window, before its step
    engine.save_checkpoint(folder)
    engine.destroy()
    resumed = _engine(gas, stage)
    resumed.load_checkpoint(folder)
    _train(resumed, 2 * gas, plain)
    ours, theirs = (e.module.state_dict()["layer.weight"] for e in (resumed, truth))
    answer = (
        (ours - theirs).abs().max().item(),
        truth.module.seen[2 * gas * 2 :],
        resumed.module.seen,
    )
    truth.destroy()
    resumed.destroy()
    return answer


@pytest.mark.fast_cases("1-3-2-False", "1-1-0-True", "2-1-0-True")
@pytest.mark.parametrize(("gas", "stage", "plain"), [(3, 2, False), (1, 0, True)])
@pytest.mark.parametrize("world", [1, 2])
def test_the_window_runs_again_on_its_samples(
    ranks: Any, tmp_path: Path, world: int, gas: int, stage: int, plain: bool
) -> None:
    for off, expected, found in ranks(world, _resumed, str(tmp_path / "c"), gas, stage, plain):
        assert found == expected
        assert off == 0


def test_saving_in_the_window_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = _engine(2, 0)
    with caplog.at_level(logging.WARNING, "ds_core.engine"):
        _train(engine, 2, plain=False)
        engine.save_checkpoint(str(tmp_path / "c"), tag="whole")
        assert "middle of an accumulation window" not in caplog.text
        _train(engine, 1, plain=False)
        engine.save_checkpoint(str(tmp_path / "c"), tag="open")
    assert "middle of an accumulation window" in caplog.text
    engine.destroy()
