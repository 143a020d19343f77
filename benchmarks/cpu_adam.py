"""CPU optimizer steps as a fraction of what memory allows, beside torch's and DeepSpeed's.

The limit is a kernel with the same reads and writes and no arithmetic (cpu_limit.cpp), measured in
turns with each contestant; the fraction is median against median. For a thousand tensors it works
on a thousand of its own, which lie as malloc puts them: that alone makes it slower than on one flat
tensor. `again` is the same limit on other memory: how much of a fraction is chance. `kernel` is one
call of the kernel table's function; `step` is ``optimizer.step()`` of dscore-optimizers where that is
installed; both run on dscore-ops-cpu.

    python benchmarks/cpu_adam.py [--sizes 1e7 1e8] [--threads 1 2] [--cases fp32 ...] [--deepspeed
    PYTHON]

``--deepspeed PYTHON`` names an interpreter that has deepspeed and can build its CPU operations; it
is timed in a process of its own, with the same limit beside it. Build them before (it takes
minutes), and set TORCH_EXTENSIONS_DIR.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

HERE = Path(__file__).parent
CASES = ("fp32", "fp32 x1000", "mixed", "bf16", "lion", "adagrad")
Step = Callable[[], None]
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
KERNEL = {"lr": 1e-3, "weight_decay": 0.01}
CLIP = 1.0


def build_limit(folder: Path) -> Path:
    target = folder / "limit.so"
    command = [
        "g++",
        "-O3",
        "-march=native",
        "-fopenmp",
        "-shared",
        "-fPIC",
        str(HERE / "cpu_limit.cpp"),
    ]
    subprocess.run([*command, "-o", str(target)], check=True)
    return target


def tensors(n: int, many: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One tensor of `n` elements, or `many` of unequal sizes that add up to it."""
    if many == 1:
        return [torch.randn(n, dtype=dtype)]
    sizes = [n // many + (i % 7 - 3) * (n // many // 8) for i in range(many)]
    sizes[-1] += n - sum(sizes)
    return [torch.randn(s, dtype=dtype) for s in sizes]


class Bench:
    """The tensors of one case, and its limit."""

    def __init__(self, case: str, n: int, threads: int, limit: ctypes.CDLL) -> None:
        torch.set_num_threads(threads)
        self.case = case
        self.n = n
        self.many = 1000 if "x1000" in case else 1
        half = torch.bfloat16
        self.params = tensors(n, self.many, half if case == "bf16" else torch.float32)
        self.grads = tensors(n, self.many, half if case in ("bf16", "mixed") else torch.float32)
        self.copies = tensors(n, self.many, half) if case == "mixed" else None
        self.room: list[torch.Tensor] = []
        self.limit = self.make_limit(limit, threads)

    def make_limit(self, limit: ctypes.CDLL, threads: int) -> Step:
        """What all are compared with, each time on new memory."""
        # The limit works on memory of its own: it leaves whatever bits, and some are slow to
        # calculate with. what is returned must not keep `self`
        case = self.case
        n = self.n
        many = self.many
        room = [torch.zeros(64), torch.ones(n, dtype=self.grads[0].dtype)]
        room += [torch.ones(n, dtype=self.params[0].dtype) for _ in range(3)]
        self.room += room
        sink, *arguments = (ctypes.c_void_p(t.data_ptr()) for t in room)
        count = {"lion": 2, "adagrad": 2}.get(case, 3)
        size = ctypes.c_long(n)
        if case == "mixed":
            copies = torch.ones(n, dtype=torch.bfloat16)
            self.room.append(copies)
            copy = ctypes.c_void_p(copies.data_ptr())
            return lambda: limit.limit_mixed(threads, size, *arguments, copy, sink)
        if case == "bf16":
            return lambda: limit.limit16(threads, size, *arguments)
        if many == 1:
            return lambda: limit.limit32(threads, size, count, *arguments)
        each = [[torch.ones(p.numel()) for p in self.params] for _ in range(4)]
        self.room += [t for tensors in each for t in tensors]
        lists = [(ctypes.c_void_p * many)(*(t.data_ptr() for t in tensors)) for tensors in each]
        sizes = (ctypes.c_long * many)(*(p.numel() for p in self.params))
        return lambda: limit.limit32_each(threads, ctypes.c_long(many), sizes, *lists)

    def with_grads(self) -> list[torch.nn.Parameter]:
        """The same tensors as parameters with gradients (widened for an optimizer that takes only
        its own dtype).
        """
        params = [torch.nn.Parameter(p) for p in self.params]
        for param, grad in zip(params, self.grads, strict=True):
            if grad.dtype == param.dtype:
                param.grad = grad
        return params


def loop(optimizer: Any) -> Step:
    def step() -> None:
        optimizer.step()

    return step


def mixed_by_hand(bench: Bench, params: list[torch.nn.Parameter], optimizer: Any) -> Step:
    """The step as people write it: norm of 16-bit gradients, widen and clip, fp32 step, cast
    out."""
    copies = bench.copies
    assert copies is not None

    def step() -> None:
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(g) for g in bench.grads])
        )
        scale = min(1.0, CLIP / (float(norm) + 1e-6))
        for param, grad in zip(params, bench.grads, strict=True):
            param.grad = grad.float().mul_(scale)
        optimizer.step()
        for param, copy in zip(params, copies, strict=True):
            copy.copy_(param.detach())

    return step


def torchs(bench: Bench) -> dict[str, Step]:
    names = ("loop", "foreach", "fused")
    out: dict[str, Step] = {}
    for name in names:
        params = bench.with_grads()
        how = {"foreach": name == "foreach", "fused": name == "fused"}
        if bench.case == "lion":
            continue  # torch has none
        if bench.case == "adagrad":
            out[f"torch {name}"] = loop(torch.optim.Adagrad(params, lr=1e-3, **how))
        elif bench.case == "mixed":
            out[f"torch {name}"] = mixed_by_hand(
                bench, params, torch.optim.AdamW(params, **ADAM, **how)
            )
        else:
            out[f"torch {name}"] = loop(torch.optim.AdamW(params, **ADAM, **how))
    return out


def ours(bench: Bench) -> dict[str, Step]:
    from ds_ops_cpu import kernels as k

    p = bench.params
    g = bench.grads
    first = [torch.zeros_like(t) for t in p]
    if bench.case == "lion":
        return {"kernel": lambda: k.lion(p, g, first, beta1=0.9, beta2=0.99, **KERNEL)}
    if bench.case == "adagrad":
        return {"kernel": lambda: k.adagrad(p, g, first, eps=1e-10, **KERNEL)}
    second = [torch.zeros_like(t) for t in p]
    rest: dict[str, Any] = {"step": 10, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, **KERNEL}
    if bench.case == "mixed":
        copies = bench.copies

        def mixed() -> None:
            norm = float(k.squared_norm(g)) ** 0.5
            k.adam(p, g, first, second, scale=min(1.0, CLIP / (norm + 1e-6)), copies=copies, **rest)

        return {"kernel": mixed}
    out: dict[str, Step] = {"kernel": lambda: k.adam(p, g, first, second, **rest)}
    try:
        from ds_optimizers.adam import AdamW  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return out
    out["step"] = loop(AdamW(bench.with_grads(), fp32_optimizer_states=False, **ADAM))
    return out


def theirs(bench: Bench) -> dict[str, Step]:
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad  # type: ignore[import-not-found]
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found]
    from deepspeed.ops.lion import DeepSpeedCPULion  # type: ignore[import-not-found]

    params = bench.with_grads()
    if bench.case == "lion":
        return {"DeepSpeed": loop(DeepSpeedCPULion(params, lr=1e-3))}
    if bench.case == "adagrad":
        return {"DeepSpeed": loop(DeepSpeedCPUAdagrad(params, lr=1e-3))}
    optimizer = DeepSpeedCPUAdam(params, fp32_optimizer_states=bench.case != "bf16", **ADAM)
    return {
        "DeepSpeed": mixed_by_hand(bench, params, optimizer)
        if bench.case == "mixed"
        else loop(optimizer)
    }


def clock(step: Step) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def compare(bench: Bench, contestants: dict[str, Step], seconds: float) -> dict[str, float]:
    """Per contestant, the limit's median time over its own, all in turns."""
    for step in (bench.limit, *contestants.values()):
        step()
    times: dict[str, list[float]] = {name: [] for name in ("limit", *contestants)}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["limit"]) < 5:
        for name, step in contestants.items():
            times["limit"].append(clock(bench.limit))
            times[name].append(clock(step))
    best = median(times["limit"])
    return {"limit": best, **{name: best / median(times[name]) for name in contestants}}


def measure(
    who: str, cases: list[str], sizes: list[int], threads: list[int], limit: str
) -> list[dict[str, Any]]:
    library = ctypes.CDLL(limit)
    rows = []
    for n in sizes:
        for case in cases:
            for count in threads:
                bench = Bench(case, n, count, library)
                if who == "deepspeed":
                    contestants = theirs(bench)
                else:
                    contestants = {
                        "again": bench.make_limit(library, count),
                        **ours(bench),
                        **torchs(bench),
                    }
                seconds = 2.0 if n < 5e7 else 4.0
                rows.append(
                    {"case": case, "n": n, "threads": count, **compare(bench, contestants, seconds)}
                )
                del bench, contestants
                print(rows[-1], file=sys.stderr)
    return rows


def table(rows: list[dict[str, Any]]) -> None:
    names = ["again", "kernel", "step", "torch loop", "torch foreach", "torch fused", "DeepSpeed"]
    print("| case | elements | threads | limit | " + " | ".join(names) + " |")
    print("| --- " * (4 + len(names)) + "|")
    for row in rows:
        cells = [f"{row[n]:.2f}" if n in row else "" for n in names]
        head = [row["case"], f"{row['n']:.0e}", str(row["threads"]), f"{row['limit'] * 1e3:.1f} ms"]
        print("| " + " | ".join([*head, *cells]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", type=float, default=[1e7, 1e8])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--deepspeed", metavar="PYTHON")
    parser.add_argument("--as", dest="who", default="main", help=argparse.SUPPRESS)
    parser.add_argument("--limit", help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [int(s) for s in options.sizes]
    if options.who != "main":
        print(
            json.dumps(measure(options.who, options.cases, sizes, options.threads, options.limit))
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        limit = str(build_limit(Path(folder)))
        rows = measure("ours", options.cases, sizes, options.threads, limit)
        if options.deepspeed:
            numbers = [str(x) for x in (*sizes, "--threads", *options.threads)]
            command = [
                options.deepspeed,
                __file__,
                "--as",
                "deepspeed",
                "--limit",
                limit,
                "--cases",
                *options.cases,
            ]
            environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {
                "DS_ACCELERATOR": "cpu"
            }
            done = subprocess.run(
                [*command, "--sizes", *numbers], stdout=subprocess.PIPE, text=True, env=environment
            )
            found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else []
            for row, other in zip(rows, found, strict=False):
                row |= {k: v for k, v in other.items() if k not in row}
    table(rows)


if __name__ == "__main__":
    main()
