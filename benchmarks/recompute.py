"""What recomputation costs: dscore-activation-checkpointing against torch.utils.checkpoint, in the same
run.

A GPT's blocks in fp32 on one thread, with dropout, in three sizes; forward and backward of all
blocks, each contestant in turn. `config` is the section activation_checkpointing with `modules`,
the others are called by hand per block.

    python benchmarks/recompute.py [--rounds 15] [--sizes tiny small medium]

ms: the median of all rounds, of this process's time on the CPU; extra: over no recomputation;
ratio: of the extra time to that of torch's non-reentrant checkpoint with the same policy. kept: MB
that a forward leaves for backward.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import time
from collections.abc import Callable

import torch
from ds_activation_checkpointing.deepspeed.checkpointing import Settings
from ds_activation_checkpointing.kept_outputs import TORCH_CONTEXTS
from ds_activation_checkpointing.recompute import recompute
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ds_core

SIZES = {"tiny": (8, 32, 2, 16), "small": (6, 128, 4, 64), "medium": (4, 256, 4, 256)}
"""Blocks, width, batch, length."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.LayerNorm(width)
        self.second = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (
            t.view(batch, length, 4, width // 4).transpose(1, 2)
            for t in self.qkv(self.first(x)).chunk(3, -1)
        )
        q, k, v = split
        weights = F.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(width // 4), dim=-1)
        x = x + F.dropout(self.out(torch.matmul(weights, v).transpose(1, 2).reshape(x.shape)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1)


class Blocks(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def calls() -> dict[str, Callable[[nn.Module, Tensor], Tensor]]:
    """How each contestant calls a block."""
    ours = Settings()
    kept = TORCH_CONTEXTS["keep_matmuls"]
    return {
        "none": lambda block, x: block(x),
        "torch": lambda block, x: checkpoint(block, x, use_reentrant=False),
        "torch reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
        "ours": lambda block, x: recompute(block, (x,), {}, ours.options("block")),
        "torch, keep_matmuls": lambda block, x: checkpoint(
            block, x, use_reentrant=False, context_fn=kept
        ),
        "ours, keep_matmuls": lambda block, x: recompute(
            block, (x,), {}, ours.options("block", "keep_matmuls")
        ),
    }


def forward(model: Blocks, call: Callable[[nn.Module, Tensor], Tensor], x: Tensor) -> Tensor:
    for block in model.blocks:
        x = call(block, x)
    return x


def contestants(size: str) -> dict[str, Callable[[], Tensor]]:
    """Name -> a forward to the loss."""
    count, width, batch, length = SIZES[size]
    torch.manual_seed(0)
    model = Blocks(count, width)
    x = torch.randn(batch, length, width, requires_grad=True)
    found = {name: functools.partial(forward, model, call, x) for name, call in calls().items()}
    section = {"activation_checkpointing": {"modules": "auto"}}
    engine, *_ = ds_core.initialize(
        model=Blocks(count, width), config={"train_batch_size": batch, **section}
    )
    found["ours, config"] = functools.partial(engine.module, x)
    return {name: lambda run=run: run().square().mean() for name, run in found.items()}


def kept(run: Callable[[], Tensor]) -> float:
    """MB that a forward leaves behind."""
    with torch.profiler.profile(profile_memory=True) as profile:
        loss = run()
    del loss
    return sum(event.self_cpu_memory_usage for event in profile.key_averages()) / 1e6


def seconds(run: Callable[[], Tensor], repeats: int) -> float:
    begin = time.process_time()
    for _ in range(repeats):
        run().backward()
    return (time.process_time() - begin) / repeats


def compare(size: str, rounds: int) -> None:
    runs = contestants(size)
    memory = {name: kept(run) for name, run in runs.items()}
    once = seconds(runs["none"], 2)
    repeats = max(1, round(0.1 / once))
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for index in range(rounds):
        # nobody is always first
        for name in names[index % len(names) :] + names[: index % len(names)]:
            times[name].append(seconds(runs[name], repeats))
    plain = times["none"]
    print(f"\n{size}: blocks, width, batch, length = {SIZES[size]}")
    print(f"{'':24}{'ms':>9}{'extra':>9}{'ratio':>8}{'kept MB':>10}")
    for name in names:
        rival = times["torch, keep_matmuls" if "keep" in name else "torch"]
        base, ms, theirs = (statistics.median(found) * 1e3 for found in (plain, times[name], rival))
        more = ms - base
        ratio = (ms - base) / (theirs - base)
        print(f"{name:24}{ms:9.2f}{more:9.2f}{ratio:8.2f}{memory[name]:10.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for size in given.sizes:
        compare(size, given.rounds)


if __name__ == "__main__":
    main()
