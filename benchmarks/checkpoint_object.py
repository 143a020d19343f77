"""Saving to and loading from an object store through a link of 1 Gbit/s, beside the raw rate of the
library that does it.

All on the same ranks and the same link, in the same run, in rounds. The raw rate is obstore's, of as
many bytes in one object per rank, in parts of the same size, as many at once. What is saved is
durable when it is timed: the manifest is in place. "load" compares all with their checksums before a
state is changed; "unchecked" is ``"checkpoint": {"verify": false}``.

    python benchmarks/checkpoint_object.py [--nproc 2] [--millions 40] [--gbit 1] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from checkpoint import engine_of, timed, train_once

PART = 1 << 24
REQUESTS = 8
URL = "s3://bucket/run"


def raw(rank: int, size: int, note: Callable[[str, float], None]) -> None:
    """`size` bytes of this rank there and back, by the library alone."""
    import obstore
    from obstore.store import from_url

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    store = from_url("s3://bucket", endpoint=endpoint, client_options={"allow_http": True})
    key = f"raw/{rank}"
    block = os.urandom(PART)
    parts = [block] * (size // PART) + [block[: size % PART]]

    def put() -> None:
        options = {"use_multipart": True, "chunk_size": PART, "max_concurrency": REQUESTS}
        obstore.put(store, key, iter(parts), **options)

    def get() -> None:
        starts = range(0, size, PART)
        with ThreadPoolExecutor(REQUESTS) as pool:
            ends = [min(start + PART, size) for start in starts]
            found = pool.map(
                lambda start, end: len(obstore.get_range(store, key, start=start, end=end)),
                starts,
                ends,
            )
            assert sum(found) == size

    note("raw put", timed(put))
    note("raw get", timed(get))
    obstore.delete(store, [key])


def worker(arguments: argparse.Namespace) -> None:
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        times.setdefault(name, []).append(seconds)

    engine = engine_of("ds_core", arguments.millions, 1)
    train_once(engine)
    unchecked = engine_of("ds_core", arguments.millions, 1, verify=False)
    train_once(unchecked)
    size = 12 * sum(p.numel() for p in engine.module.parameters())
    for _ in range(arguments.rounds):
        raw(rank, size // dist.get_world_size(), note)
        note("save", timed(lambda: engine.save_checkpoint(URL, "a")))
        note("load", timed(lambda: engine.load_checkpoint(URL)))
        note("load unchecked", timed(lambda: unchecked.load_checkpoint(URL)))
    if rank == 0:
        Path(arguments.result).write_text(json.dumps({"size": size, "times": times}))
    engine.destroy()
    dist.barrier()
    dist.destroy_process_group()


def program(*arguments: str) -> tuple[subprocess.Popen[str], int]:
    """One of `_object_server.py`, and its port."""
    command = [sys.executable, str(Path(__file__).with_name("_object_server.py")), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def launch(arguments: argparse.Namespace, folder: Path, endpoint: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    result = folder / "result.json"
    command = [sys.executable, __file__, "--worker", "--result", str(result)]
    command += ["--millions", str(arguments.millions), "--rounds", str(arguments.rounds)]
    shared = {
        "WORLD_SIZE": str(arguments.nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }
    ranks = [
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=sys.stderr,
        )
        for r in range(arguments.nproc)
    ]
    if any(p.wait() for p in ranks):
        raise SystemExit("a rank failed")
    found = json.loads(result.read_text())
    print(f"{found['size'] / 1e6:.0f} MB of states, {arguments.nproc} ranks")
    for name, values in found["times"].items():
        other = found["times"]["raw put" if "save" in name or "put" in name else "raw get"]
        rates = [before / own for before, own in zip(other, values, strict=True)]
        print(
            f"{name:16s} {median(values):7.2f} s {found['size'] / median(values) / 1e6:6.0f} MB/s"
            f"   {median(rates):.2f} of raw"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--millions", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--result")
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return
    server, behind = program("server")
    link, port = program("link", str(behind), str(arguments.gbit * 125e6))
    try:
        with tempfile.TemporaryDirectory() as folder:
            launch(arguments, Path(folder), f"http://127.0.0.1:{port}")
    finally:
        server.kill()
        link.kill()


if __name__ == "__main__":
    main()
