"""What drawing by index costs: steps of an engine with the section `reproducibility` against the
same without it, in the same run.

A GPT's blocks in fp32 on one thread, in three sizes; zero gradients, forward, backward and SGD, with
dropout of 0.1 and with none. One mask alone is timed against torch's.

    python benchmarks/reproducibility.py [--rounds 15] [--sizes tiny small medium]

ms: the median of all rounds, interleaved, of this process's time on the CPU.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from ds_reproducibility import counter
from ds_testing.truth import start
from torch import Tensor, nn
from torch.nn import functional

SIZES = {"tiny": (8, 32, 2, 16), "small": (6, 128, 4, 64), "medium": (4, 256, 4, 256)}
"""Blocks, width, batch, length."""


class Block(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.first = nn.LayerNorm(width)
        self.second = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            t.view(batch, length, 4, width // 4).transpose(1, 2)
            for t in self.qkv(self.first(x)).chunk(3, -1)
        )
        scores = torch.matmul(query, key.transpose(2, 3)) / math.sqrt(width // 4)
        weights = self.drop(functional.softmax(scores, dim=-1))
        heads = torch.matmul(weights, value).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.out(heads))
        added: Tensor = self.drop(self.down(functional.gelu(self.up(self.second(x)))))
        return x + added


def stepper(size: str, p: float, ours: bool) -> Callable[[], None]:
    """One step of an engine."""
    blocks, width, batch, length = SIZES[size]
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width, p) for _ in range(blocks)))
    engine = start(model, micro=batch, **({"reproducibility": {}} if ours else {}))
    x = torch.randn(batch, length, width)

    def step() -> None:
        engine.backward(engine(x).square().mean())
        engine.step()

    return step


def measured(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median ms of each, in turn."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds + 2):
        for name, run in contestants.items():
            begin = time.process_time()
            run()
            # The first two warm up.
            if round_ >= 2:
                times[name].append(1e3 * (time.process_time() - begin))
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)

    print("size      p    without   with   ratio")
    for size in options.sizes:
        for p in (0.1, 0.0):
            found = measured(
                {"without": stepper(size, p, False), "with": stepper(size, p, True)},
                options.rounds,
            )
            ratio = found["with"] / found["without"]
            print(f"{size:8} {p:3.1f} {found['without']:8.2f} {found['with']:8.2f}   {ratio:.2f}")

    print("one mask  elements   torch   ours   ratio")
    key = counter.Key.of("benchmark")
    for shape in ((4, 16), (8, 128, 128), (8, 128, 1024)):
        x = torch.empty(shape)
        grid = counter.Grid([torch.arange(n) for n in shape])
        found = measured(
            {
                "torch": lambda x=x: torch.empty_like(x).bernoulli_(0.9),  # type: ignore[misc]
                "ours": lambda grid=grid: counter.below(key, grid, 0.1),  # type: ignore[misc]
            },
            4 * options.rounds,
        )
        ratio = found["ours"] / found["torch"]
        print(f"{x.numel():18}   {found['torch']:7.3f} {found['ours']:7.3f}   {ratio:.2f}")


if __name__ == "__main__":
    main()
