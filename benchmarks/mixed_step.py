"""`engine.step()` in mixed precision as a fraction of what memory allows, at every ZeRO stage,
beside DeepSpeed's.

A step of 16-bit weights with fp32 masters needs the gradients twice (norm, update; 2 bytes each),
three fp32 tensors read and written and the new 16-bit weights written: 30 bytes per parameter. The
limit is a kernel with just these reads and writes and no arithmetic (`limit_mixed` in
cpu_limit.cpp), timed in turns with the step; the fraction is median over median. `copy` is
``Tensor.copy_`` of fp32 tensors of that many bytes together. Only `engine.step()` is timed; forward
and backward of a batch of one come before each.

    python benchmarks/mixed_step.py [--threads 1 2] [--cases "stage 2" ...] [--clip 0 1]
    [--deepspeed PYTHON]

20 Linear layers of 1024 x 1024 (21 M parameters), one process. Clipping: 0: it never takes effect,
1: always; fp16 has a loss scale of 1024, so that gradients are always scaled. ``--deepspeed
PYTHON`` names an interpreter that has deepspeed, which gets a process of its own; build its CPU
Adam before, and set TORCH_EXTENSIONS_DIR. ``--profile``: where the time goes, by torch's profiler.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import glob
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from cpu_adam import build_limit
from torch import nn

LAYERS = 20
WIDTH = 1024
WARMUP = 3
NEVER = 1e9
ALWAYS = 1e-6
CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    "stage 2, fp16": {
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": True, "loss_scale": 1024},
    },
    "stage 0, fp16": {
        "zero_optimization": {"stage": 0},
        "fp16": {"enabled": True, "loss_scale": 1024},
    },
    "stage 2, offload": {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "stage 3, offload": {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        }
    },
}


def settings(case: str, clip: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": ALWAYS if clip else NEVER,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        **({} if "fp16" in CASES[case] else {"bf16": {"enabled": True}}),
        **CASES[case],
    }


def make_engine(who: str, case: str, clip: bool) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if who == "ours":
        import ds_core

        return ds_core.initialize(model=model, config=settings(case, clip))[0]
    import deepspeed  # type: ignore[import-not-found]

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    config = {**settings(case, clip), "steps_per_print": 10**9}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def one(engine: Any, x: torch.Tensor) -> float:
    """Forward, backward, and a step; the seconds of the step."""
    engine.backward(engine(x).float().square().mean())
    start = time.perf_counter()
    engine.step()
    return time.perf_counter() - start


def clock(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(who: str, options: argparse.Namespace, limit: ctypes.CDLL) -> list[dict[str, Any]]:
    n = LAYERS * WIDTH * (WIDTH + 1)
    half = [torch.ones(n, dtype=torch.bfloat16) for _ in range(2)]
    room = [torch.ones(n) for _ in range(3)]
    sink = torch.zeros(64)
    source = torch.ones(n * 30 // 8)
    target = torch.ones(n * 30 // 8)
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (half[0], *room, half[1], sink)]
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for case in options.cases:
            for clip in options.clip:
                try:
                    engine = make_engine(who, case, bool(clip))
                except Exception as error:
                    if who == "ours":
                        raise
                    # what DeepSpeed does not have on a CPU
                    print(f"{case}: {error}", file=sys.stderr)
                    rows.append({"limit": math.nan, "step": 1.0})
                    continue
                x = torch.randn(1, WIDTH).to(torch.float16 if "fp16" in case else torch.bfloat16)
                for _ in range(WARMUP):
                    one(engine, x)
                times: dict[str, list[float]] = {"limit": [], "copy": [], "step": []}
                if options.profile:
                    profile(engine, x)
                for _ in range(options.rounds):
                    times["step"].append(one(engine, x))
                    bound = functools.partial(
                        limit.limit_mixed, threads, ctypes.c_long(n), *pointers
                    )
                    times["limit"].append(clock(bound))
                    times["copy"].append(clock(lambda: target.copy_(source)))
                found = {name: median(ts) for name, ts in times.items()}
                rows.append({"case": case, "threads": threads, "clip": clip, **found})
                print(rows[-1], file=sys.stderr)
                if who == "ours":
                    engine.destroy()
                del engine
    return rows


def profile(engine: Any, x: torch.Tensor) -> None:
    engine.backward(engine(x).float().square().mean())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        engine.step()
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=12), file=sys.stderr)


def table(rows: list[dict[str, Any]]) -> None:
    print(
        "| case | threads | clipping | limit | copy | step | of the limit | DeepSpeed | over "
        "DeepSpeed |"
    )
    print("| --- " * 9 + "|")
    for row in rows:
        cells = [
            f"{row['limit'] * 1e3:.1f} ms",
            f"{row['copy'] * 1e3:.1f} ms",
            f"{row['step'] * 1e3:.1f} ms",
        ]
        cells.append(f"**{row['limit'] / row['step']:.2f}**")
        if not math.isnan(row.get("deepspeed", math.nan)):
            fraction = row["deepspeed"]
            ours = row["limit"] / row["step"]
            cells += [f"{fraction:.2f}", f"{ours / fraction:.1f}x"]
        else:
            cells += ["", ""]
        clipping = "active" if row["clip"] else "not active"
        print("| " + " | ".join([row["case"], str(row["threads"]), clipping, *cells]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--clip", nargs="+", type=int, default=[0, 1], choices=[0, 1])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--deepspeed", metavar="PYTHON")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--as", dest="who", default="main", help=argparse.SUPPRESS)
    parser.add_argument("--limit", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.who != "main":
        print(json.dumps(measure(options.who, options, ctypes.CDLL(options.limit))))
        return
    with tempfile.TemporaryDirectory() as folder:
        limit = str(build_limit(Path(folder)))
        arguments = [__file__, *sys.argv[1:], "--limit", limit, "--as"]
        rows = run([sys.executable, *arguments, "ours"])
        if options.deepspeed:
            try:
                theirs = run([options.deepspeed, *arguments, "deepspeed"])
            finally:
                for leftover in glob.glob("/dev/shm/deepspeed_allreduce_buffer_*"):
                    os.unlink(leftover)
            for row, other in zip(rows, theirs, strict=True):
                row["deepspeed"] = other["limit"] / other["step"]
    table(rows)


def run(command: list[str]) -> list[dict[str, Any]]:
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29617",
    }
    environment = (
        {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        | alone
        | {"DS_ACCELERATOR": "cpu"}
    )
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
