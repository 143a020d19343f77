"""Reading and writing a disk: dscore-nvme's engines beside raw io_uring, fio and DeepSpeed's aio
handle.

    python benchmarks/nvme.py FOLDER [--size MIB] [--rounds N] [--only NAME ...] [--deepspeed-python
    PYTHON]

All move one file by direct I/O in blocks of 1 MiB, 8 under way, one thread. raw io_uring: a loop in
C++ (raw_uring.cpp) that does nothing else, with memory registered in the ring; dscore-nvme's engines
use the same memory. In each round each contestant writes the file for about half a second (fio,
which counts whole ones, a second), and then each reads it, in random order; the medians over rounds
count, and ratios to raw io_uring are taken round by round. Needs g++, and fio (Debian: apt install
fio) unless --only leaves it out. DeepSpeed has a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from _other_python import answer, orders, other_python

BLOCK = 1 << 20
DEPTH = 8
RAW = "raw io_uring"
CHECKED = "dscore-nvme, io_uring, checksums"
Contestant = Callable[[bool], float]
"""Write (True) or read for a while: bytes per second."""


def rate(move: Callable[[], object], nbytes: int, seconds: float) -> float:
    begin = time.perf_counter()
    moved = 0
    while (took := time.perf_counter() - begin) < seconds or not moved:
        move()
        moved += nbytes
    return moved / took


def filled(nbytes: int) -> Any:
    """The memory of raw io_uring and of dscore-nvme's engines: how it lies in pages counts, so all have
    the same.
    """
    import torch
    from ds_nvme.memory import aligned

    memory = aligned(nbytes)
    memory.view(torch.int64).random_()
    return memory


def raw(path: Path, memory: Any, seconds: float, built: Path) -> Contestant:
    """The limit."""
    source = Path(__file__).parent / "raw_uring.cpp"
    subprocess.run(
        ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", str(source), "-o", str(built)], check=True
    )
    library = ctypes.CDLL(str(built), use_errno=True)
    library.open_ring.restype = ctypes.c_void_p
    nbytes = memory.numel()
    ring = library.open_ring(DEPTH, ctypes.c_void_p(memory.data_ptr()), ctypes.c_uint64(nbytes))
    if not ring:
        raise SystemExit(f"raw io_uring does not work here: {os.strerror(ctypes.get_errno())}")

    def run(write: bool) -> float:
        file = os.open(path, os.O_RDWR | os.O_DIRECT)
        sizes = (ctypes.c_uint64(nbytes), BLOCK, DEPTH)

        def move() -> None:
            if error := library.move(ctypes.c_void_p(ring), file, ctypes.c_bool(write), *sizes):
                raise OSError(error, os.strerror(error), str(path))

        try:
            return rate(move, nbytes, seconds)
        finally:
            os.close(file)

    return run


def fio(path: Path, nbytes: int, seconds: float) -> Contestant:
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed: apt install fio")

    def run(write: bool) -> float:
        command = [
            *(
                "fio",
                "--name=raw",
                f"--filename={path}",
                f"--size={nbytes}",
                f"--rw={'write' if write else 'read'}",
            ),
            *(
                f"--bs={BLOCK}",
                f"--iodepth={DEPTH}",
                "--ioengine=io_uring",
                "--direct=1",
                "--overwrite=1",
            ),
            *(
                "--time_based",
                f"--runtime={math.ceil(seconds)}",
                "--output-format=json",
                "--fallocate=none",
                "--invalidate=0",
            ),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][
            "write" if write else "read"
        ]
        return float(job["io_bytes"] / job["runtime"] * 1e3)

    return run


def ours(path: Path, memory: Any, seconds: float, engine_name: str, checks: bool) -> Contestant:
    from ds_nvme.engines import Settings
    from ds_nvme.files import open_file
    from ds_nvme.probe import open_engine

    engine = open_engine(engine_name, Settings(BLOCK, DEPTH))
    nbytes = memory.numel()
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
    """As fio does it: all blocks are moved from and to the same few MiB, which stay in the
    processor's caches.
    """
    from ds_nvme.engines import Settings
    from ds_nvme.files import open_file
    from ds_nvme.memory import aligned
    from ds_nvme.probe import open_engine

    engine = open_engine("io_uring", Settings(BLOCK, DEPTH))
    part = BLOCK * DEPTH
    memory = aligned(part).random_()

    def move(write: bool) -> None:
        under_way = [
            engine.start(
                open_file(path, write=write),
                write=write,
                offset=at,
                address=memory.data_ptr(),
                nbytes=part,
            )
            for at in range(0, nbytes, part)
        ]
        for transfer in under_way:
            transfer.wait()

    return lambda write: rate(lambda: move(write), nbytes, seconds)


def deepspeed(python: str, path: Path, nbytes: int, seconds: float) -> Contestant:
    ask = other_python(
        python, __file__, [str(path), "--serve", str(nbytes), "--seconds", str(seconds)]
    )
    return lambda write: float(ask("write" if write else "read"))


def serve(path: str, nbytes: int, seconds: float) -> None:
    """DeepSpeed's handle: runs in its own environment."""
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found]

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(BLOCK, DEPTH, False, True, 1)
    buffer = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8))
    buffer.view(torch.int64).random_()
    for order in orders():
        move = handle.sync_pwrite if order == "write" else handle.sync_pread
        answer(rate(lambda move=move: move(buffer, path), nbytes, seconds))  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=512, help="MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--only", nargs="+", help="beside raw io_uring")
    parser.add_argument("--deepspeed-python")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(str(given.folder), given.serve, given.seconds)
        return
    path = given.folder / "nvme-benchmark"
    nbytes = given.size << 20
    seconds = given.seconds
    memory = filled(nbytes)
    makers: dict[str, Callable[[], Contestant]] = {
        "fio, io_uring": lambda: fio(path, nbytes, seconds),
        **{
            f"dscore-nvme, {engine}": partial(ours, path, memory, seconds, engine, checks=False)
            for engine in ("io_uring", "kernel aio", "threads", "python threads")
        },
        CHECKED: lambda: ours(path, memory, seconds, "io_uring", checks=True),
        "dscore-nvme, io_uring, 8 MiB of memory": lambda: ours_in_little_memory(
            path, nbytes, seconds
        ),
    }
    if given.deepspeed_python:
        makers["DeepSpeed aio_handle"] = lambda: deepspeed(
            given.deepspeed_python, path, nbytes, seconds
        )
    if unknown := set(given.only or ()) - set(makers):
        parser.error(
            f"--only: no contestant is called {min(unknown)!r}; there are {', '.join(makers)}"
        )
    with tempfile.TemporaryDirectory() as folder:
        contestants = {RAW: raw(path, memory, seconds, Path(folder) / "raw_uring.so")}
        contestants |= {
            name: make() for name, make in makers.items() if not given.only or name in given.only
        }
    measure(contestants, path, nbytes, given.rounds)


def measure(contestants: dict[str, Contestant], path: Path, nbytes: int, rounds: int) -> None:
    found: dict[str, dict[bool, list[float]]] = {
        name: {True: [], False: []} for name in contestants
    }
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        contestants[RAW](True)  # the file is there, with all its space, before anything is timed
        for number in range(rounds):
            for write in (True, False):
                for name in random.Random(f"{number}{write}").sample(
                    list(contestants), len(contestants)
                ):
                    found[name][write].append(contestants[name](write))
    finally:
        path.unlink(missing_ok=True)
    show(found)


def show(found: dict[str, Any]) -> None:
    base = found[RAW]
    print("| | write MB/s | of raw | read MB/s | of raw |\n| --- | --- | --- | --- | --- |")
    for name, rates in found.items():
        cells = []
        for write in (True, False):
            ratio = median(a / b for a, b in zip(rates[write], base[write], strict=True))
            cells += [f"{median(rates[write]) / 1e6:.0f}", f"{ratio:.2f}x"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
