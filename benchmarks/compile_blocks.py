"""Seconds per step of a small transformer on 2 ranks: eager, compiled by blocks, and with a graph
per gathering module.

Run: ``python benchmarks/compile_blocks.py [--layers 4] [--width 128] [--steps 10] [--stage 3]``.
The last is what ``model.compile()`` gives at stage 3. Backend inductor; compiling is not counted,
and its time is shown apart.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from ds_testing import run_ranks
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        result: Tensor = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return result


def measure(how: str, stage: int, layers: int, width: int, steps: int) -> tuple[float, float, int]:
    """Seconds per step (median), seconds of the first one, and graphs."""
    from torch._dynamo.utils import counters

    import ds_core

    torch.set_num_threads(1)
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(layers)), nn.Linear(width, 1))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 0},
    }
    engine, *_ = ds_core.initialize(model=model, config=config)
    if how == "blocks":
        engine.compile()
    elif how == "model":
        model.compile()
    x = torch.randn(4, 128, width)
    times = []
    for _ in range(steps + 1):
        begin = time.perf_counter()
        engine.backward(engine(x).square().mean())
        engine.step()
        times.append(time.perf_counter() - begin)
    engine.destroy()
    return statistics.median(times[1:]), times[0], counters["stats"]["unique_graphs"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 4), ("width", 128), ("steps", 10), ("stage", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    for how in ("eager", "model", "blocks"):
        arguments = (given.stage, given.layers, given.width, given.steps)
        step, first, graphs = run_ranks(2, measure, how, *arguments, timeout=600)[0]
        print(f"{how:7} {1000 * step:8.1f} ms per step, first {first:6.1f} s, {graphs} graphs")
