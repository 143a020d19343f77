"""What a profiled forward costs, and what is counted: dscore-flops-profiler, torch's FlopCounterMode,
DeepSpeed's profiler.

Three models in fp32 on one thread: a GPT, a ResNet and a mixture of experts. Each contestant
profiles the same forward of the same input, in turn with the others; DeepSpeed's runs in a process
of its own, in turn with this one.

    python benchmarks/flops_profiler.py [--blocks 7] [--deepspeed-python PYTHON]

ms: the best forward of all blocks, and how much longer than without a profiler it takes. Torch's
counter has no times of modules, and counts products alone; it does not know attention on the CPU,
so the GPT has its attention written out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Counts = tuple[int, int]
"""FLOPs and MACs of a forward."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.LayerNorm(width)
        self.second = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ffn = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (
            t.view(batch, length, 8, width // 8).transpose(1, 2)
            for t in self.qkv(self.first(x)).chunk(3, -1)
        )
        q, k, v = split
        weights = F.softmax(torch.matmul(q, k.transpose(2, 3)) / math.sqrt(width // 8), dim=-1)
        x = x + self.out(torch.matmul(weights, v).transpose(1, 2).reshape(x.shape))
        return x + self.ffn(self.second(x))


class Residual(nn.Module):
    def __init__(self, wide: int, out: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(wide, out, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(out) for _ in range(2))
        self.short = nn.Conv2d(wide, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norms[1](self.two(F.relu(self.norms[0](self.one(x))))) + self.short(x))


class Experts(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            y[chosen == index] = expert(x[chosen == index])
        return y


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    gpt = nn.Sequential(
        nn.Embedding(1000, 256), *(Block(256) for _ in range(4)), nn.Linear(256, 1000)
    )
    stem = (
        nn.Conv2d(3, 32, 7, 2, 3, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    )
    body = (Residual(32, 32, 1), Residual(32, 64, 2), Residual(64, 128, 2))
    resnet = nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 100))
    moe = nn.Sequential(Experts(256, 8), nn.LayerNorm(256), Experts(256, 8))
    return {
        "GPT": (gpt.eval(), torch.randint(0, 1000, (4, 128))),
        "ResNet": (resnet.eval(), torch.randn(4, 3, 128, 128)),
        "MoE": (moe.eval(), torch.randn(512, 256)),
    }


def plain(model: nn.Module, x: Tensor) -> Callable[[], Counts]:
    def run() -> Counts:
        model(x)
        return 0, 0

    return run


def profiled(profiler: Any) -> Callable[[nn.Module, Tensor], Callable[[], Counts]]:
    """Ours and DeepSpeed's: the hooks are put on before the forward and removed after it, as at a
    profiled step.
    """

    def make(model: nn.Module, x: Tensor) -> Callable[[], Counts]:
        def run() -> Counts:
            made = profiler(model)
            made.start_profile()
            model(x)
            made.stop_profile()
            counts = made.get_total_flops(), made.get_total_macs()
            made.end_profile()
            return counts

        return run

    return make


def by_torch(model: nn.Module, x: Tensor) -> Callable[[], Counts]:
    from torch.utils.flop_counter import FlopCounterMode

    def run() -> Counts:
        with FlopCounterMode(display=False) as counter:
            model(x)
        return counter.get_total_flops(), counter.get_total_flops() // 2

    return run


def block(contestants: Mapping[str, Any], runs: int = 5) -> dict[str, Any]:
    """model -> contestant -> [milliseconds of the best run, FLOPs, MACs]"""
    found: dict[str, Any] = {}
    for name, (model, x) in models().items():
        for who, make in contestants.items():
            run = make(model, x)
            run()
            times = []
            for _ in range(runs):
                start = time.perf_counter()
                counts = run()
                times.append((time.perf_counter() - start) * 1e3)
            found.setdefault(name, {})[who] = [min(times), *counts]
    return found


def peer() -> None:
    """In DeepSpeed's process: a block for each line that comes."""
    import logging

    from deepspeed.profiling.flops_profiler import FlopsProfiler

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    for _ in sys.stdin:
        made = block({"plain, DeepSpeed's torch": plain, "DeepSpeed": profiled(FlopsProfiler)})
        print("BLOCK " + json.dumps(made), flush=True)


def ask(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("BLOCK "):
            return json.loads(line[6:])  # type: ignore[no-any-return]
    raise SystemExit("DeepSpeed's process has ended")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--deepspeed-python", help="a Python that has DeepSpeed")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peer:
        peer()
        return
    from ds_flops_profiler import FlopsProfiler

    torch.set_num_threads(1)
    process = None
    if arguments.deepspeed_python:
        command = [arguments.deepspeed_python, __file__, "--peer"]
        env = {**os.environ, "DS_ACCELERATOR": "cpu"}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
    best: dict[str, dict[str, list[float]]] = {}
    contestants = {
        "plain": plain,
        "dscore-flops-profiler": profiled(FlopsProfiler),
        "FlopCounterMode": by_torch,
    }
    for _ in range(arguments.blocks):
        for made in (block(contestants), ask(process) if process else {}):
            for model, rows in made.items():
                for who, row in rows.items():
                    known = best.setdefault(model, {}).setdefault(who, row)
                    known[0] = min(known[0], row[0])
    for model, rows in best.items():
        print(f"{model:<8}{'':<26}{'ms':>8}{'cost':>8}{'FLOPs':>16}{'MACs':>16}")
        for who, (ms, flops, macs) in rows.items():
            base = rows["plain, DeepSpeed's torch" if "DeepSpeed" in who else "plain"][0]
            counts = f"{flops:>16,}{macs:>16,}" if flops else ""
            print(f"{'':<8}{who:<26}{ms:>8.2f}{100 * (ms / base - 1):>7.0f}%{counts}")
    if process is not None:
        process.terminate()


if __name__ == "__main__":
    main()
