"""A rank is killed in mid-training; `dscore run --max-restarts` goes on from the last checkpoint as
if nothing were.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch, ds_core
from torch.utils.data import TensorDataset

folder, dies = Path(sys.argv[1]), json.loads(sys.argv[2])
torch.manual_seed(0)
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.drop, self.b = torch.nn.Linear(6, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 1)
    def forward(self, x, y):
        return (self.b(self.drop(self.a(x))) - y).square().mean()
data = TensorDataset(torch.randn(40, 6), torch.randn(40, 1))
engine, _, loader, _ = ds_core.initialize(model=Net(), training_data=data, config={
    "train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
    "zero_optimization": {"stage": 2}, "checkpoint": {"async": True}})
engine.load_checkpoint(folder / "runs", missing_ok=True)
torch.manual_seed(1) if engine.global_steps == 0 else None
while engine.global_steps < 8:
    loss = float(engine.train_batch())
    if engine.global_rank == 0:
        with open(folder / "losses", "a") as file:
            file.write(json.dumps([engine.global_steps, loss]) + chr(10))
    mark = folder / f"died{engine.global_steps}"
    if engine.global_rank == 1 and engine.global_steps in dies and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    engine.save_checkpoint(folder / "runs")
engine.destroy()
"""


def run(folder: Path, dies: list[int], restarts: int) -> tuple[int, dict[int, float], str]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    words = [
        "run",
        "--nproc",
        "2",
        "--max-restarts",
        str(restarts),
        "train.py",
        str(folder),
        json.dumps(dies),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "ds_cli", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    losses = dict(json.loads(line) for line in (folder / "losses").read_text().splitlines())
    return done.returncode, losses, done.stderr


@pytest.mark.slow
def test_a_killed_rank_costs_a_restart_and_nothing_else(tmp_path: Path) -> None:
    code, whole, said = run(tmp_path / "whole", [], 0)
    assert code == 0, said
    code, losses, said = run(tmp_path / "killed", [3, 6], 2)
    assert code == 0, said
    assert "restart 2 of 2" in said
    assert "SIGKILL" in said
    assert losses == whole
