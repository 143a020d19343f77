"""A run of which ranks are killed once: ``peer_run.py SETTINGS``, a file of JSON.

Its ranks may be on hosts that are simulated: each has a name of its own. Writes what each rank has
after each start, and at the end, into the folder of the settings.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import ds_core
from ds_core import comm


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, 4 * width)
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(4 * width)
        self.head = nn.Linear(4 * width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.norm(self.drop(self.first(x.to(self.first.weight.dtype))))
        loss: Tensor = (self.head(hidden).float() - y).square().mean()
        return loss


def engine_of(settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    random.seed(int(os.environ["RANK"]))
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": "MultiStepLR", "params": {"milestones": [3, 8]}},
        "checkpoint_peer": {"folder": settings["folder"], "every": 2} | settings.get("peer", {}),
    }
    return ds_core.initialize(
        model=Net(), training_data=data, config=config | settings.get("config", {})
    )[0]


def wait_for_sets(engine: Any) -> None:
    """So that a test knows which sets there are."""
    engine.wait_for_checkpoint()
    comm.barrier()


def main(path: str) -> None:
    settings = json.loads(Path(path).read_text())
    folder = Path(settings["folder"])
    rank = int(os.environ["RANK"])
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if hosts := settings.get("hosts"):
        name = f"host{hosts[rank]}"
        socket.gethostname = lambda: name
    engine = engine_of(settings)
    began = time.perf_counter()
    loaded, client = engine.load_checkpoint(str(folder), missing_ok=True)
    note: dict[str, Any] = {
        "loaded": loaded,
        "client": client,
        "step": engine.global_steps,
        "seconds": time.perf_counter() - began,
    }
    losses = []
    while engine.global_steps < settings["steps"]:
        losses.append([random.random(), engine.global_steps, engine.train_batch().item()])
        step = engine.global_steps
        if step in settings.get("saves", []):
            engine.save_checkpoint(str(folder), client_state={"saved": step})
        wait_for_sets(engine)
        if attempt == 0 and step == settings.get("kill_at"):
            if rank in settings["kill"]:
                if settings.get("lose_memory"):
                    shutil.rmtree(engine._checkpointer._room, ignore_errors=True)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
    note |= {"losses": losses, "lr": engine.get_lr()}
    note["rooms"] = [str(p) for p in Path("/dev/shm").glob(f"dscore-peer-*-{os.getppid()}-*")]
    (folder / f"end-{attempt}-{rank}.json").write_text(json.dumps(note))
    engine.destroy()


if __name__ == "__main__":
    main(sys.argv[1])
