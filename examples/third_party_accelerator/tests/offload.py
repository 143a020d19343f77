"""Activations of blocks in host memory or not: ``dscore run --nproc N offload.py OUT`` leaves
``OUT/rank<n>.json``.

held: bytes of the device at the end of a forward, more than before it. peak: the most until the end
of its backward.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from ds_testing.truth import whole_weights
from torch import Tensor, nn

import ds_core

LAYERS = 6
WIDTH = 32
ROWS = 16384


class Block(nn.Module):
    """Saves its input and what comes out of relu: 3 x WIDTH elements per row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.relu(self.up(x)))
        return result


def train(stage: int, offload: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if offload:
        config["sequence_parallel"] = {"offload_activations": {"min_bytes": 1024, "in_flight": 1}}
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(LAYERS)), nn.Linear(WIDTH, 1)
    )
    engine = ds_core.initialize(model=model, config=config)[0]
    accelerator = ds_core.get_accelerator()
    losses = []
    for step in range(3):
        random = torch.Generator().manual_seed(step + 10 * engine.global_rank)
        x = torch.randn(ROWS, WIDTH, generator=random).to(engine.device)
        accelerator.synchronize()
        before = accelerator.memory_allocated()
        accelerator.reset_peak_memory_stats()
        loss = engine(x).mean()
        accelerator.synchronize()
        held = accelerator.memory_allocated() - before
        engine.backward(loss)
        peak = accelerator.max_memory_allocated() - before
        engine.step()
        losses.append(loss.item())
        del loss
    weights = {name: weight.cpu().tolist() for name, weight in whole_weights(engine).items()}
    seen = {
        "device": str(engine.device),
        "losses": losses,
        "weights": weights,
        "held": held,
        "peak": peak,
    }
    engine.destroy()
    return seen


if __name__ == "__main__":
    found = [[stage, train(stage, False), train(stage, True)] for stage in (0, 3)]
    rank = os.environ["RANK"]
    Path(sys.argv[1], f"rank{rank}.json").write_text(
        json.dumps({"unit": ROWS * WIDTH * 4, "layers": LAYERS, "found": found})
    )
