"""The lives of a run that is started again, on hosts that are simulated: what ranks do in tests."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ds_run_state import RunState
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ds_core
from ds_core import comm

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    "scheduler": {"type": "MultiStepLR", "params": {"milestones": [2, 5]}},
}
ZERO = {"reduce_bucket_size": 50, "param_persistence_threshold": 5}
CPU = {"device": "cpu"}
MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "stage 1": {"zero_optimization": {"stage": 1, **ZERO}, "bf16": {"enabled": True}},
    "stage 2 offload": {"zero_optimization": {"stage": 2, "offload_optimizer": CPU, **ZERO}},
    "stage 3": {"zero_optimization": {"stage": 3, **ZERO}, "checkpoint": {"async": True}},
    "stage 3 local": {
        "zero_optimization": {"stage": 3, **ZERO},
        "checkpoint": {"use_node_local_storage": True},
    },
}


class Net(nn.Module):
    """Dropout and batch statistics: what a rank has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 24)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(24)
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(self.drop(self.first(x.to(self.first.weight.dtype))))
        noise = random.random() * 0.01
        loss: Tensor = (self.head(hidden).float() - y + noise).square().mean()
        return loss


class Said(logging.Handler):
    """The warnings of checkpoints, while entered."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Said:
        for name in ("ds_checkpoint", "ds_checkpoint_peer"):
            logging.getLogger(name).addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("ds_checkpoint", "ds_checkpoint_peer"):
            logging.getLogger(name).removeHandler(self)


def begin(folder: str, mode: str, hosts: Sequence[int], **peer: Any) -> Any:
    """An engine of a run that its launcher starts again; hosts: by rank, the number of its host."""
    from ds_core.process import STATE

    STATE.told.clear()
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"
    name = f"host{hosts[comm_rank()]}"
    socket.gethostname = lambda: name
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 8), torch.randn(48, 1))
    torch.manual_seed(3)
    random.seed(3 + comm_rank())
    section = {"folder": folder, "every": 3, "memory": str(Path(folder) / "memory")} | peer
    Path(section["memory"]).mkdir(exist_ok=True, parents=True)
    config = BASE | MODES[mode] | {"checkpoint_peer": section}
    return ds_core.initialize(model=Net(), training_data=data, config=config)[0]


def comm_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def rooms(folder: str) -> list[Path]:
    return sorted((Path(folder) / "memory").glob("dscore-peer-*"))


def killed(engine: Any) -> None:
    """As a process that is killed: the engine is not closed at its end."""
    engine._checkpointer = None


def steps_of(engine: Any, steps: int) -> list[float]:
    return [engine.train_batch().item() for _ in range(steps)]


def everything(engine: Any) -> dict[str, Any]:
    """All that a step depends on, by name."""
    run = RunState(engine)
    states = {
        s.name: s.values().detach().flatten().double().tolist()
        for s in run.states(engine.optimizer)
    }
    common = json.dumps(run.common(), default=lambda v: sorted(v.items()), sort_keys=True)
    return {"states": states, "common": common, "draw": [torch.rand(1).item(), random.random()]}


def first_life(folder: str, mode: str, hosts: Sequence[int], disk: bool, peer: Any) -> Any:
    """Three steps, after which there is a set, and two more; (their losses, all, warnings)."""
    with Said() as said:
        engine = begin(folder, mode, hosts, **peer)
        steps_of(engine, 2)
        if disk:
            engine.save_checkpoint(folder, client_state={"epoch": 7})
        steps_of(engine, 1)
        engine.wait_for_checkpoint()
        comm.barrier()
        losses = steps_of(engine, 2)
        killed(engine)
        return losses, everything(engine), said.texts


def second_life(folder: str, mode: str, hosts: Sequence[int], peer: Any, steps: int = 2) -> Any:
    """(name and step of what was loaded, its client state, losses, all, warnings)."""
    with Said() as said:
        engine = begin(folder, mode, hosts, **peer)
        steps_of(engine, 1)  # what was there before must not shine through
        path, client = engine.load_checkpoint(folder, missing_ok=True)
        step = engine.global_steps
        where = None if path is None else "memory" if "dscore-peer" in path else "disk"
        losses = steps_of(engine, steps)
        state = everything(engine)
        engine.destroy()
        return [where, step], client, losses, state, said.texts
