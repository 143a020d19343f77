"""A step with `offload_optimizer.super_offload` beside one of plain offload, in turns in one
process.

    python benchmarks/super_offload.py [--width 1024] [--layers 16] [--wait 0 8] [--steps 12]
    [--clip]

A machine without accelerators has nothing idle in backward: ``--wait 0`` shows what SuperOffload
costs there. A device that computes elsewhere is played by a pause of so many milliseconds in the
backward of each layer (`time.sleep`, which leaves the cores to others); of a real one neither its
speed nor its link is shown. bf16 weights, AdamW with fp32 masters on the host, stage 2, one rank.
The weights of both must be equal at the end, bit by bit. ``--clip``: every second step is clipped,
so that half of what is begun ahead is undone.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn


class Pause(torch.autograd.Function):
    """The identity, whose backward takes a while in which this process computes nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Model(nn.Module):
    def __init__(self, width: int, layers: int, wait: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.wait = wait

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = Pause.apply(torch.tanh(layer(x)) + x, self.wait)
        return x.float().square().mean()


def make(width: int, layers: int, wait: float, ahead: bool) -> Any:
    import ds_core

    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 2,
            "reduce_bucket_size": width * width + width,
            "offload_optimizer": {"device": "cpu", "super_offload": ahead},
        },
    }
    return ds_core.initialize(model=Model(width, layers, wait), config=config)[0]


def step(engine: Any, x: Tensor) -> float:
    began = time.perf_counter()
    engine.backward(engine(x))
    engine.step()
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--wait", type=float, nargs="+", default=[0, 8])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--clip", action="store_true")
    given = parser.parse_args()
    small = (
        torch.randn(1, given.width, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.01
    )
    print(
        f"{given.layers} layers of {given.width}, {torch.get_num_threads()} threads; median of "
        f"{given.steps} steps, ms"
    )
    for wait in given.wait:
        engines = [make(given.width, given.layers, wait / 1e3, ahead) for ahead in (False, True)]
        times: list[list[float]] = [[], []]
        for turn in range(given.steps + 3):
            x = small * (1000 if given.clip and turn % 2 else 1)
            for engine, found in zip(engines, times, strict=True):
                found.append(step(engine, x))
        plain, early = (median(t[3:]) for t in times)
        updates = engines[1].partitioner.updates
        pairs = zip(engines[0].module.parameters(), engines[1].module.parameters(), strict=True)
        equal = all(torch.equal(a, b) for a, b in pairs)
        print(
            f"pause {wait:g} per layer: plain {plain:.1f}, super_offload {early:.1f} "
            f"({early / plain:.2f}x); "
            f"{updates.kept} buckets ahead, {updates.undone} undone; same weights: {equal}",
            flush=True,
        )
        for engine in engines:
            engine.destroy()


if __name__ == "__main__":
    main()
