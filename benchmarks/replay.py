"""What replays cost: time per step with the section ``numerics`` over the same steps without it.

One process, one thread, a transformer. Three engines take turns in blocks of steps: without the
section; with it, where no step is due; and with it, where each is. The least CPU time of the blocks
of each counts, which other processes disturb least.

    python benchmarks/replay.py [--width 256] [--layers 4] [--tokens 512] [--every 20] [--stages 0 2 3]

It prints, per ZeRO stage, the overhead of a step that is not due, that of a replay in steps, and
both together for ``--every``, beside the promise 1/N + 1 %.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BLOCKS = 15
STEPS = 3


class Model(nn.Module):
    """A transformer without embeddings, whose loss is a mean square."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def make(width: int, layers: int, tokens: int, stage: int, every: int) -> Callable[[], None]:
    """A step of an engine; every: 0 for no section."""
    import ds_core

    torch.manual_seed(0)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    if every:
        config["numerics"] = {"every": every}
    engine, *_ = ds_core.initialize(model=Model(width, layers), config=config)
    x = torch.randn(4, tokens // 4, width)

    def step() -> None:
        engine.backward(engine(x))
        engine.step()

    return step


def seconds(step: Callable[[], None], count: int) -> float:
    """CPU time of `count` steps."""
    start = time.process_time()
    for _ in range(count):
        step()
    return time.process_time() - start


def measure(width: int, layers: int, tokens: int, stage: int) -> tuple[float, float]:
    """(overhead of a step that is not due, overhead of a replay), as shares of a plain step."""
    plain, idle, due = (make(width, layers, tokens, stage, n) for n in (0, 10**9, 1))
    for step in (plain, idle, due):
        seconds(step, 2)
    times: dict[Callable[[], None], list[float]] = {step: [] for step in (plain, idle, due)}
    for _ in range(BLOCKS):
        for step, found in times.items():
            found.append(seconds(step, STEPS))
    least = min(times[plain])
    return min(times[idle]) / least - 1, min(times[due]) / least - 1


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--stages", type=int, nargs="+", default=[0, 2, 3])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    promised = 1 / asked.every + 0.01
    print(
        f"{'stage':>5} {'not due':>9} {'replay':>9} {'every ' + str(asked.every):>9} {'promise':>9}"
    )
    for stage in asked.stages:
        quiet, replayed = measure(asked.width, asked.layers, asked.tokens, stage)
        total = quiet + (replayed - quiet) / asked.every
        print(f"{stage:>5} {quiet:>9.2%} {replayed:>9.2%} {total:>9.2%} {promised:>9.2%}")


if __name__ == "__main__":
    main()
