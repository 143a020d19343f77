"""Saving and loading 100 M parameters with Adam states: ds_core against torch.save, torch's DCP and
DeepSpeed.

All on the same ranks, the same bytes, the same folder, in the same run, in rounds that begin with
another one each. Every save ends with fsync (those that do not call it are followed by one of their
files, which is told apart), so that what is measured is work that is done. Before each load the
files are dropped from the system's cache; then they are loaded once more with them there, as a job
does that is started again at once. ds_core compares all with their checksums before it changes a
state; "unchecked" leaves that out, as the others do (``"checkpoint": {"verify": false}``).

With ``--ours`` only ds_core is measured, beside raw reading of the same files.

    python benchmarks/checkpoint.py [--nproc 2] [--ours] [--millions 100] [--folder .] [--deepspeed-python
    /tmp/dsv/bin/python]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH = 2048


def build(millions: int) -> nn.Module:
    layers = max(1, round(millions * 1e6 / (WIDTH * WIDTH)))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def fill(optimizer: Any) -> None:
    """Adam's states, as after a step."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.randn_like(p),
                "exp_avg_sq": torch.rand_like(p),
            }


def sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def disk(folder: Path, size: int) -> tuple[float, float]:
    """Seconds to write `size` bytes in one stream and bring them to the disk, and to read them from
    there.
    """
    block = memoryview(bytearray(os.urandom(1 << 24)))
    path = folder / "stream"
    start = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        file.writelines(block for _ in range(0, size, len(block)))
        os.fsync(file.fileno())
    written = time.perf_counter() - start
    forget(folder)
    start = time.perf_counter()
    room = bytearray(1 << 18)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(room):
            pass
    read = time.perf_counter() - start
    path.unlink()
    return written, read


def timed(work: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def engine_of(kind: str, millions: int, stage: int, **options: bool) -> Any:
    """options: the config's section ``checkpoint`` (of ds_core)."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    model = build(millions)
    if kind == "ds_core":
        import ds_core

        config["checkpoint"] = options
        return ds_core.initialize(model=model, config=config)[0]
    import deepspeed

    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def train_once(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, WIDTH)).square().mean())
    engine.step()


def cold(folder: Path, work: Callable[[], Any]) -> float:
    """Seconds of `work` with nothing of `folder` in the page cache."""
    if dist.get_rank() == 0:
        forget(folder)
    return timed(work)


def loads(
    name: str, folder: Path, note: Callable[[str, float], None], load: Callable[[], Any]
) -> float:
    """The seconds of the load from the disk."""
    seconds = cold(folder, load)
    note(f"{name} load", seconds)
    note(f"{name} load from the cache", timed(load))
    return seconds


def raw(folder: Path) -> None:
    """This rank's part of the files' bytes, read as they come; ranks divide the files."""
    files = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: -p.stat().st_size)
    room = bytearray(1 << 20)
    for path in files[dist.get_rank() :: dist.get_world_size()]:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(room):
                pass


def worker(arguments: argparse.Namespace) -> None:
    rank = int(os.environ["RANK"])
    folder = Path(arguments.folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    if arguments.worker == "deepspeed":
        for stage in (0, 1):
            engine = engine_of("deepspeed", arguments.millions, stage)
            train_once(engine)
            for _ in range(arguments.rounds):
                note(
                    f"DeepSpeed stage {stage}: save",
                    timed(lambda e=engine: (e.save_checkpoint(str(folder)), rank or sync(folder))),
                )
                loads(
                    f"DeepSpeed stage {stage}:",
                    folder,
                    note,
                    lambda e=engine: e.load_checkpoint(str(folder)),
                )
                rank or shutil.rmtree(folder)
                dist.barrier()
    else:
        others(arguments, folder, rank, note)
    if rank == 0:
        Path(arguments.result).write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


class States:
    """The model and its Adam states as torch has them."""

    def __init__(self, millions: int) -> None:
        self.model = build(millions)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        fill(self.optimizer)
        # Bytes: a weight and two states of Adam, of 4 each.
        self.size = 12 * sum(p.numel() for p in self.model.parameters())

    def save(self, file: Path) -> None:
        torch.save(
            {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file
        )

    def load(self, file: Path) -> None:
        state = torch.load(file, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def tree(self) -> dict[str, Any]:
        """All of them in one dict, as torch's DCP takes them."""
        return {
            "model": self.model.state_dict(),
            "optimizer": {str(i): s for i, s in enumerate(self.optimizer.state.values())},
        }


def by_torch(states: States, folder: Path, rank: int, note: Callable[[str, float], None]) -> None:
    file = folder / "all.pt"
    note(
        "torch.save by one process: save",
        timed(lambda: rank or (states.save(file), sync(folder))),
    )
    loads("torch.save by one process:", folder, note, lambda: rank or states.load(file))


def by_dcp(states: States, folder: Path, rank: int, note: Callable[[str, float], None]) -> None:
    import torch.distributed.checkpoint as dcp

    note(
        "torch DCP: save",
        timed(lambda: (dcp.save(states.tree(), checkpoint_id=folder), rank or sync(folder))),
    )
    loads("torch DCP:", folder, note, lambda: dcp.load(states.tree(), checkpoint_id=folder))


def others(
    arguments: argparse.Namespace, folder: Path, rank: int, note: Callable[[str, float], None]
) -> None:
    engines = {
        f"ds_core stage {stage}{told}": engine_of("ds_core", arguments.millions, stage, **options)
        for stage, told, options in (
            (0, "", {}),
            (0, " unchecked", {"verify": False}),
            (1, "", {}),
            (1, " unchecked", {"verify": False}),
            (1, " async", {"async": True}),
        )
    }
    for engine in engines.values():
        train_once(engine)
    states = States(arguments.millions)

    def by_engine(name: str) -> None:
        engine = engines[name]
        note(f"{name}: save", timed(lambda: engine.save_checkpoint(str(folder))))
        note(f"{name}: until it is on the disk", timed(engine.wait_for_checkpoint))
        if rank == 0:
            held = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
            note(f"{name}: bytes / bytes of states", held / states.size)
        # Before and after: a disk's speed changes from one second to the next.
        before = cold(folder, partial(raw, folder))
        load = loads(f"{name}:", folder, note, lambda: engine.load_checkpoint(str(folder)))
        after = cold(folder, partial(raw, folder))
        note(f"{name}: the same files, read raw", (before + after) / 2)
        note(f"{name}: raw / load", (before + after) / 2 / load)

    def by_hand() -> None:
        if rank == 0:
            for what, seconds in zip(("write", "read"), disk(folder, states.size), strict=True):
                note(f"the disk, one stream: {what}", seconds)

    others_turns = [
        by_hand,
        partial(by_torch, states, folder, rank, note),
        partial(by_dcp, states, folder, rank, note),
    ]
    turns: list[Callable[[], None]] = [
        *([] if arguments.ours else others_turns),
        *(partial(by_engine, name) for name in engines),
    ]
    for turn in range(arguments.rounds):
        # who follows whom matters to a disk
        for work in turns[turn % len(turns) :] + turns[: turn % len(turns)]:
            clean(folder, rank)
            work()


def clean(folder: Path, rank: int) -> None:
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        os.sync()  # what was deleted is not paid for by the next one
    dist.barrier()


def launch(
    python: str, kind: str, arguments: argparse.Namespace, folder: Path
) -> dict[str, list[float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    result = folder / "result.json"
    command = [
        python,
        __file__,
        "--worker",
        kind,
        "--folder",
        str(folder / "checkpoints"),
        "--result",
        str(result),
    ]
    command += ["--millions", str(arguments.millions), "--rounds", str(arguments.rounds)]
    command += ["--ours"] if arguments.ours else []
    shared = {
        "WORLD_SIZE": str(arguments.nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    env = (
        os.environ
        | shared
        | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
    )
    ranks = [
        subprocess.Popen(
            command, env=env | {"RANK": str(r), "LOCAL_RANK": str(r)}, stdout=sys.stderr
        )
        for r in range(arguments.nproc)
    ]
    if any(p.wait() for p in ranks):
        raise SystemExit(f"{kind} failed")
    times: dict[str, list[float]] = json.loads(result.read_text())
    return times


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--millions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--ours", action="store_true", help="only ds_core, beside raw reading")
    parser.add_argument("--deepspeed-python")
    parser.add_argument("--worker")
    parser.add_argument("--result")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        times = launch(sys.executable, "others", arguments, Path(folder))
        if arguments.deepspeed_python:
            times |= launch(arguments.deepspeed_python, "deepspeed", arguments, Path(folder))
    for name, values in times.items():
        print(
            f"{name:45s} {median(values):8.3f}   (best {min(values):.3f}, worst {max(values):.3f})"
        )


if __name__ == "__main__":
    main()
