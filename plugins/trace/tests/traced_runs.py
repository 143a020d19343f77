"""Runs with planted faults, for the tests of dscore-trace; called on the ranks of a pool."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from ds_trace.all_ranks import Comparison
from torch import Tensor, nn

SLOW = 0.04  # seconds that the planted straggler sleeps in each forward
PLANTED = 1 << 18  # elements of the planted collective


def section(folder: Path, **more: Any) -> dict[str, Any]:
    """The section ``torch_profiler`` of a run that records two steps."""
    return {"enabled": True, "folder": str(folder), "wait": 1, "record": 2, **more}


def row(found: Comparison, title: str, label: str = "") -> Any:
    """The first row of the table with this title, and `label` in its label."""
    return next(r for r in found.rows if r.title == title and label in r.label)


class Net(nn.Module):
    """Sleeps on one rank, and makes a collective of its own."""

    def __init__(self, sleeps: bool) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)
        self.sleeps = sleeps

    def forward(self, x: Tensor) -> Tensor:
        from ds_core import comm

        if self.sleeps:
            time.sleep(SLOW)
        out: Tensor = self.down(torch.tanh(self.up(x))).square().mean()
        comm.label("planted")
        comm.all_reduce(torch.ones(PLANTED))
        return out


def data_parallel(section: dict[str, Any], stage: int, slow: int) -> list[float]:
    """Losses of 5 steps on all ranks; rank `slow` sleeps."""
    import ds_core
    from ds_core import comm

    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 10},
        **({"torch_profiler": section} if section else {}),
    }
    engine, *_ = ds_core.initialize(model=Net(comm.rank() == slow), config=config)
    losses = []
    x = torch.linspace(-1, 1, 256).view(4, 64)
    for _ in range(5):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert not [i for i in comm.interceptors() if "ds_trace" in type(i).__module__], (
        "it is taken out after the last step"
    )
    engine.destroy()
    return losses


class Slow(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLOW)
        return super().forward(x)


def pipeline(section: dict[str, Any]) -> None:
    """Two stages with two micro-batches; the first stage is the slow one."""
    from ds_pipeline import PipelineModule

    import ds_core

    layers = [Slow(8, 8), nn.Linear(8, 8)]
    model = PipelineModule(
        layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform"
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "pipeline": {},
        "torch_profiler": section,
    }
    engine, *_ = ds_core.initialize(model=model, config=config)
    for _ in range(3):
        engine.train_batch(iter([(torch.ones(2, 8), torch.zeros(2, 8))] * 2))
    engine.destroy()
