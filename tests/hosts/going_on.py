"""Trains a small model and goes on from its checkpoints: ``going_on.py FOLDER EVERY PAUSE [SETS]``.

SETS: steps from one set in the hosts' memory to the next.

Ends after the number of steps that FOLDER/steps says, once it is there. Rank 0 of each start writes
a line a step.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import ds_core


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.layers(x), y)


def wanted(folder: Path) -> float:
    """The number of steps."""
    return float((folder / "steps").read_text()) if (folder / "steps").exists() else float("inf")


def main(folder: Path, every: int, pause: float, sets: int = 0) -> None:
    torch.manual_seed(3)
    numbers = torch.arange(300.0, dtype=torch.float64)
    data = torch.utils.data.TensorDataset(numbers.reshape(50, 6).sin(), numbers[:50, None].cos())
    config = {
        "elasticity": {
            "enabled": True,
            "max_train_batch_size": 12,
            "micro_batch_sizes": [1, 2, 3],
            "max_gpus": 6,
        },
        "autosave": {"folder": str(folder / "checkpoints"), "every": every},
        "zero_optimization": {"stage": 2},
        "checkpoint": {"keep_last": 3},
        "optimizer": {"type": "Adam", "params": {"lr": 0.002}},
    }
    if sets:
        config["checkpoint_peer"] = {"folder": str(folder / "checkpoints"), "every": sets}
    engine, *_ = ds_core.initialize(model=Net().double(), config=config, training_data=data)
    engine.resume()
    start = {"world": engine.world_size, "host": socket.gethostname()}
    name = (
        f"start-{time.time():.3f}-{os.getpid()}"
        if engine.global_rank == 0
        else f"rank-{engine.global_rank}"
    )
    with (folder / name).open("w", buffering=1) as log:
        while engine.global_steps < wanted(folder):
            step = engine.global_steps
            loss = float(engine.train_batch())
            log.write(json.dumps({"step": step, "loss": loss} | start) + "\n")
            time.sleep(pause)
    engine.destroy()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:]))
