"""Reading and writing a disk: ds-nvme's engines beside fio (a plain io_uring loop) and DeepSpeed's aio handle.

    python benchmarks/nvme.py FOLDER [--size MIB] [--rounds N] [--deepspeed-python PYTHON]

All move one file by direct I/O in blocks of 1 MiB, 8 under way, one thread. In each round each contestant writes the
file for about half a second (fio, which counts whole ones, a second), and then each reads it, in random order; the
medians over rounds count, and ratios are taken round by round. Needs fio (Debian: apt install fio). DeepSpeed has a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import IO, Any

BLOCK, DEPTH = 1 << 20, 8
Contestant = Callable[[bool], float]
"""Write (True) or read for a while: bytes per second."""


def rate(move: Callable[[], object], nbytes: int, seconds: float) -> float:
    begin, moved = time.perf_counter(), 0
    while (took := time.perf_counter() - begin) < seconds or not moved:
        move()
        moved += nbytes
    return moved / took


def fio(path: Path, nbytes: int, seconds: float) -> Contestant:
    def run(write: bool) -> float:
        command = [
            *("fio", "--name=raw", f"--filename={path}", f"--size={nbytes}", f"--rw={'write' if write else 'read'}"),
            *(f"--bs={BLOCK}", f"--iodepth={DEPTH}", "--ioengine=io_uring", "--direct=1", "--overwrite=1"),
            *(
                "--time_based",
                f"--runtime={math.ceil(seconds)}",
                "--output-format=json",
                "--fallocate=none",
                "--invalidate=0",
            ),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["write" if write else "read"]
        return float(job["io_bytes"] / job["runtime"] * 1e3)

    return run


def ours(path: Path, nbytes: int, seconds: float, engine_name: str, checks: bool) -> Contestant:
    import torch
    from ds_nvme.engines import Settings
    from ds_nvme.files import open_file
    from ds_nvme.memory import aligned
    from ds_nvme.probe import open_engine

    engine = open_engine(engine_name, Settings(BLOCK, DEPTH))
    memory = aligned(nbytes)
    memory.view(torch.int64).random_()
    sums: bytes | None = b"" if checks else None

    def move(write: bool) -> None:
        nonlocal sums
        transfer = engine.start(
            open_file(path, write=write),
            write=write,
            offset=0,
            address=memory.data_ptr(),
            nbytes=nbytes,
            sums=sums if not write or not checks else b"",
        )
        transfer.wait()
        if write and checks:
            sums = transfer.sums()

    def run(write: bool) -> float:
        if not write and checks:
            move(True)  # others have written the file meanwhile
        return rate(lambda: move(write), nbytes, seconds)

    return run


def ours_in_little_memory(path: Path, nbytes: int, seconds: float) -> Contestant:
    """As fio does it: all blocks are moved from and to the same few MiB, which stay in the processor's caches."""
    from ds_nvme.engines import Settings
    from ds_nvme.files import open_file
    from ds_nvme.memory import aligned
    from ds_nvme.probe import open_engine

    engine, part = open_engine("io_uring", Settings(BLOCK, DEPTH)), BLOCK * DEPTH
    memory = aligned(part).random_()

    def move(write: bool) -> None:
        under_way = [
            engine.start(open_file(path, write=write), write=write, offset=at, address=memory.data_ptr(), nbytes=part)
            for at in range(0, nbytes, part)
        ]
        for transfer in under_way:
            transfer.wait()

    return lambda write: rate(lambda: move(write), nbytes, seconds)


def deepspeed(python: str, path: Path, nbytes: int, seconds: float) -> Contestant:
    process = subprocess.Popen(
        [python, __file__, str(path), "--serve", str(nbytes), "--seconds", str(seconds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    assert process.stdin is not None and process.stdout is not None
    into, out = process.stdin, process.stdout
    if answer(out) != "ready":
        raise SystemExit("DeepSpeed's process has not started")

    def run(write: bool) -> float:
        print("write" if write else "read", file=into, flush=True)
        return float(answer(out))

    return run


def answer(out: IO[str]) -> str:
    for line in out:
        if line.startswith("> "):
            return line[2:].strip()
    raise SystemExit("the process has ended")


def serve(path: str, nbytes: int, seconds: float) -> None:
    """DeepSpeed's handle: runs in its own environment."""
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(BLOCK, DEPTH, False, True, 1)
    buffer = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    buffer.view(torch.int64).random_()
    print("> ready", flush=True)
    for line in sys.stdin:
        move = handle.sync_pwrite if line.strip() == "write" else handle.sync_pread
        print(">", rate(lambda move=move: move(buffer, path), nbytes, seconds), flush=True)  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=512, help="MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--deepspeed-python")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(str(given.folder), given.serve, given.seconds)
        return
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed: apt install fio")
    path, nbytes = given.folder / "nvme-benchmark", given.size << 20
    contestants: dict[str, Contestant] = {"fio, io_uring": fio(path, nbytes, given.seconds)}
    for engine in ("io_uring", "kernel aio", "threads", "python threads"):
        contestants[f"ds-nvme, {engine}"] = ours(path, nbytes, given.seconds, engine, checks=False)
    contestants["ds-nvme, io_uring, checksums"] = ours(path, nbytes, given.seconds, "io_uring", checks=True)
    contestants["ds-nvme, io_uring, 8 MiB of memory"] = ours_in_little_memory(path, nbytes, given.seconds)
    if given.deepspeed_python:
        contestants["DeepSpeed aio_handle"] = deepspeed(given.deepspeed_python, path, nbytes, given.seconds)
    found: dict[str, dict[bool, list[float]]] = {name: {True: [], False: []} for name in contestants}
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        contestants["ds-nvme, io_uring"](True)  # the file is there, with all its space, before anything is timed
        for number in range(given.rounds):
            for write in (True, False):
                for name in random.Random(f"{number}{write}").sample(list(contestants), len(contestants)):
                    found[name][write].append(contestants[name](write))
    finally:
        path.unlink(missing_ok=True)
    show(found)


def show(found: dict[str, Any]) -> None:
    base = found["fio, io_uring"]
    print("| | write MB/s | of fio | read MB/s | of fio |\n| --- | --- | --- | --- | --- |")
    for name, rates in found.items():
        cells = []
        for write in (True, False):
            ratio = median(a / b for a, b in zip(rates[write], base[write], strict=True))
            cells += [f"{median(rates[write]) / 1e6:.0f}", f"{ratio:.2f}x"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
