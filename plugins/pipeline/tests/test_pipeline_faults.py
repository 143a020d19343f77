"""A stage that raises, or a rank that is killed in mid-batch, ends the run at once and is named
first.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import ds_core
from ds_core import comm
from ds_pipeline import PipelineModule

how, zero, schedule = sys.argv[1], int(sys.argv[2]), sys.argv[3]

class Sometimes(nn.Linear):
    count = 0
    def forward(self, x):
        self.count += 1
        if self.count == 7 and comm.rank() == comm.world_size() - 1 and how != "data":
            Path("failed").write_text(str(time.time()))
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "raise":
                raise KeyError("what stage 1 says")
        return super().forward(x)

def data():
    while True:
        if how == "data" and engine.global_steps == 1 and comm.rank() == 0:
            Path("failed").write_text(str(time.time()))
            raise KeyError("what stage 1 says")
        yield torch.randn(2, 64), torch.randn(2, 64)

layers = [nn.Linear(64, 64), torch.tanh, nn.Linear(64, 64), Sometimes(64, 64)]
model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
engine, *_ = ds_core.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW"}, "pipeline": {"schedule": schedule}, "zero_optimization": {"stage": zero}})
for _ in range(100):
    engine.train_batch(data())
"""


@pytest.mark.parametrize(
    ("how", "nproc", "zero", "schedule"),
    [
        pytest.param("raise", 2, 3, "zero_bubble", marks=pytest.mark.slow),
        pytest.param("kill", 2, 0, "zero_bubble", marks=pytest.mark.slow),
        pytest.param("data", 2, 0, "1f1b", marks=pytest.mark.slow),
        pytest.param("raise", 4, 2, "1f1b", marks=pytest.mark.slow),
        pytest.param("kill", 4, 1, "1f1b", marks=pytest.mark.slow),
    ],
)
def test_one_rank_that_fails_ends_all(
    how: str, nproc: int, zero: int, schedule: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "ds_cli",
        "run",
        "--nproc",
        str(nproc),
        "train.py",
        how,
        str(zero),
        schedule,
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    print(f"{time.time() - float((tmp_path / 'failed').read_text()):.1f} s after it failed")
    assert done.returncode == (137 if how == "kill" else 1), done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("dscore: rank")]
    rank = 0 if how == "data" else nproc - 1
    if how == "kill":
        assert told[0].startswith(f"dscore: rank {rank} of {nproc} was killed by SIGKILL"), (
            done.stderr
        )
    else:
        assert told[0].startswith(f"dscore: rank {rank} of {nproc} failed with exit code 1"), (
            done.stderr
        )
        assert "KeyError: 'what stage 1 says'" in told[0]
        assert done.stderr.count("Traceback (most recent call last)") == 1, "the cause's, once"
