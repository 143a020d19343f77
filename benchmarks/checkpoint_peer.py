"""Sets in memory (`checkpoint_peer`): what they cost a step, and how fast a killed run is back.

138 M parameters with Adam states in fp32 (1.66 GB), as SmolLM2-135M has, on ranks of one machine
under ``dscore run``. Windows of steps with one set each alternate with windows without, in one run.
Then rank 1 is killed by SIGKILL; the launcher starts all ranks again, and they load the set from
memory, and for comparison the same states from the disk, whose files are dropped from the page
cache before.

    python benchmarks/checkpoint_peer.py [--nproc 2] [--every 10] [--rows 64] [--windows 3]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

WIDTH = 2048
LAYERS = 33


def build(folder: Path, every: int) -> Any:
    import ds_core

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "checkpoint_peer": {"folder": str(folder / "checkpoints"), "every": every},
    }
    return ds_core.initialize(model=model, config=config)[0]


def train(engine: Any, steps: int, rows: int) -> float:
    """Seconds per step."""
    import torch.distributed as dist

    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        engine.backward(engine(torch.ones(rows, WIDTH)).square().mean())
        engine.step()
    dist.barrier()
    return (time.perf_counter() - start) / steps


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def worker(arguments: argparse.Namespace) -> None:
    folder = Path(arguments.folder)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    engine = build(folder, arguments.every)
    note: dict[str, Any] = {"up": time.time()}
    if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) == 0:
        train(engine, 2, arguments.rows)
        engine.save_checkpoint(str(folder / "checkpoints"))
        peer = engine._checkpointer
        room = peer._room
        note |= {"with": [], "without": []}
        # The first set takes the memory for the copies.
        train(engine, 2 * arguments.every - 2, arguments.rows)
        for window in range(2 * arguments.windows):
            kind = ("with", "without")[window % 2]
            peer._room = room if kind == "with" else None
            note[kind].append(train(engine, arguments.every, arguments.rows))
        peer._room = room
        train(engine, arguments.every, arguments.rows)
        engine.wait_for_checkpoint()
        train(engine, 1, arguments.rows)
        note |= {"killed": time.time(), "at": engine.global_steps}
        write(folder, rank, "first", note)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    for place in ("memory", "disk"):
        if place == "disk":
            forget(folder)
        start = time.perf_counter()
        tag = None if place == "memory" else "global_step2"
        path, _ = engine.load_checkpoint(str(folder / "checkpoints"), tag)
        note[place] = time.perf_counter() - start
        if place == "memory":
            assert "dscore-peer" in path, path
            note |= {"resumed": time.time(), "step": engine.global_steps}
    write(folder, rank, "second", note)
    engine.destroy()


def write(folder: Path, rank: int, name: str, note: dict[str, Any]) -> None:
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(note))
    torch.distributed.barrier()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--folder")
    arguments = parser.parse_args()
    if arguments.folder:
        worker(arguments)
        return
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).resolve()
        launch = [sys.executable, "-m", "ds_cli", "run", "--nproc", str(arguments.nproc)]
        options = ["every", "rows", "windows"]
        given = [f"--{option}={getattr(arguments, option)}" for option in options]
        subprocess.run(
            [*launch, "--max-restarts", "1", __file__, "--folder", str(folder), *given],
            check=True,
            env=os.environ | {"DS_ACCELERATOR": "cpu"},
        )
        first = json.loads((folder / "first.json").read_text())
        second = json.loads((folder / "second.json").read_text())
    steps = {kind: median(first[kind]) for kind in ("with", "without")}
    ratios = [a / b for a, b in zip(first["with"], first["without"], strict=True)]
    print(
        f"a step: {steps['without']:.3f} s, {steps['with']:.3f} s with a set in {arguments.every}"
    )
    print(f"with / without, by pairs of windows: {', '.join(f'{r:.3f}' for r in ratios)}")
    print(f"killed at step {first['at']}, on again from step {second['step']}")
    print(f"load from memory {second['memory']:.2f} s, from the disk {second['disk']:.2f} s")
    print(f"from the kill to the load's end {second['resumed'] - first['killed']:.1f} s")


if __name__ == "__main__":
    main()
