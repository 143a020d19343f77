"""A model with every kind of state, its runs, and what is compared of them."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import torch
from ds_run_state import RunState
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ds_core

MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}},
}
ZERO: dict[str, dict[str, Any]] = {
    f"{name} stage {stage}": {
        **MODES[name],
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 50,
            "param_persistence_threshold": 5,
        },
        "checkpoint": {"async": stage == 2},
    }
    for name in ("fp32", "fp16")
    for stage in (1, 2, 3)
}


class Net(nn.Module):
    """Dropout, batch statistics, tied and frozen weights, odd buffers, extra state: everything that
    can be lost.
    """

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width, bias=False)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(width)
        self.tied = nn.Linear(width, width, bias=False)
        self.tied.weight = self.embed.weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.head = nn.Linear(width, 1)
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        noise = random.random() * 0.01 + float(np.random.rand()) * 0.01 + self.calls * 0.001
        hidden = (
            self.frozen(self.tied(self.norm(self.drop(self.embed(x.to(self.gain.dtype))))))
            * self.gain
        )
        return (self.head(hidden).float() - y + noise).square().mean()


def make(mode: str = "fp32", *, seed: int = 1, width: int = 8, **config: Any) -> Any:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, width), torch.randn(24, 1))
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    full: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "MultiStepLR", "params": {"milestones": [2, 5]}},
    }
    engine, *_ = ds_core.initialize(
        model=Net(width), training_data=data, config=full | (MODES | ZERO)[mode] | config
    )
    torch.manual_seed(seed)
    return engine


def losses_of(engine: Any, steps: int) -> list[float]:
    if not hasattr(engine, "batches"):
        engine.batches = iter(ds_core.RepeatingLoader(engine.training_dataloader))
    losses = []
    for _ in range(2 * steps):
        loss = engine(*next(engine.batches))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def everything(engine: Any) -> dict[str, Any]:
    """All that a step depends on, by name."""
    states = {s.name: s.tensor.detach().clone() for s in RunState(engine).states(engine.optimizer)}
    draws = [torch.rand(1).item(), random.random(), float(np.random.rand())]
    run = json.dumps(RunState(engine).common(), default=lambda v: sorted(v.items()), sort_keys=True)
    return {"states": states, "draws": draws, "run": run, "calls": engine.module.calls}


def first_life(folder: str, mode: str) -> Any:
    engine = make(mode)
    losses_of(engine, 3)
    engine.save_checkpoint(folder, client_state={"epoch": 1})
    return losses_of(engine, 5), engine.wait_for_checkpoint() or everything(engine)


def first_life_short(folder: str) -> Any:
    engine = make()
    losses_of(engine, 3)
    engine.save_checkpoint(folder)
    return everything(engine)


def comm_size() -> int:
    from ds_core import comm

    return comm.world_size()
