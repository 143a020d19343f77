"""Strangers who connect to the ports of a run, at each phase: they stop nothing.

Real sockets, found in /proc.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ds_testing.processes import clean_environment, free_port

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from ds_core import comm

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
def until(name):
    while not (folder / name).exists():
        time.sleep(0.01)

(folder / f"up{rank}").touch()
if rank == 1:
    until("meet")
comm.init_distributed("gloo")
(folder / f"met{rank}").touch()
until("train")
total = torch.zeros(1000)
for step in range(20):
    gradient = torch.full((1000,), float(rank + step))
    dist.all_reduce(gradient)  # gloo's own, whose connections are what strangers reach
    total += gradient
group = dist.new_group([0, 1])
dist.all_reduce(total, group=group)
print(f"rank {rank}: {total.sum().item()}", flush=True)
"""
SUM = 1000 * 2 * sum(1 + 2 * step for step in range(20))

STORE = b"\x00" + struct.pack("<I", 0x3C85F7CE)  # how a client of torch's store begins
WORDS = [
    b"",
    b"\x00",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),  # a TLS greeting
    os.urandom(100_000),
    STORE,
    STORE + b"\x01" + b"\xff" * 64,
    STORE + b"\x01" + struct.pack("<Q", 1 << 40) + b"abc",
    STORE + os.urandom(1000),
]
MANY = 1200  # more than the 1024 open files that a process has by default


def listening(root: int) -> list[tuple[str, int]]:
    """(address, port) of what a process and its children listen at."""
    sockets = set()
    for pid in family(root):
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    sockets.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                address, port = words[1].split(":")
                packed = b"".join(
                    bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)
                )
                kind = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
                found.append((socket.inet_ntop(kind, packed), int(port, 16)))
    return found


def family(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in task.read_text().split():
                yield from family(int(child))


class Strangers:
    """Connections that stay open, with what they have said."""

    def __init__(self) -> None:
        self.held: list[socket.socket] = []

    def come(self, ports: list[tuple[str, int]], many: int) -> None:
        for place in ports:
            for words in [*WORDS, *[b""] * many]:
                client = socket.create_connection(place, 10)
                self.held.append(client)
                client.settimeout(1)
                with contextlib.suppress(OSError):  # it closed, or reads no more
                    client.sendall(words)


@pytest.fixture
def strangers() -> Iterator[Strangers]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 8 * MANY:
        pytest.skip(f"{hard} open files are allowed, {8 * MANY} are needed")
    found = Strangers()
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield found
    for client in found.held:
        client.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def start_script(folder: Path, *options: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "ds_cli",
        "run",
        *options,
        str(folder / "train.py"),
        str(folder),
    ]
    return subprocess.Popen(
        ["bash", "-c", 'ulimit -Sn 1024; exec "$@"', "-", *command],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until(folder: Path, process: subprocess.Popen[str], *names: str) -> None:
    while not all((folder / name).exists() for name in names):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


@pytest.mark.slow
def test_strangers_at_the_ports_of_a_run_on_one_machine(
    tmp_path: Path, strangers: Strangers
) -> None:
    run = start_script(tmp_path, "--nproc", "2")
    try:
        until(tmp_path, run, "up0", "up1")
        while not (store := listening(run.pid)):
            time.sleep(0.02)
        strangers.come(store, MANY)
        (tmp_path / "meet").touch()
        until(tmp_path, run, "met0", "met1")
        places = listening(run.pid)
        assert len(places) >= 3 and {address for address, _ in places} == {"127.0.0.1"}, places
        strangers.come(places, MANY)
        (tmp_path / "train").touch()
        said, _ = run.communicate(timeout=60)
    finally:
        run.terminate()
        run.wait()
    assert run.returncode == 0 and said.count(f": {float(SUM)}") == 2, said


@pytest.mark.slow
def test_strangers_while_machines_are_waited_for(tmp_path: Path, strangers: Strangers) -> None:
    port = free_port()
    options = (
        "--nproc",
        "1",
        "--nnodes",
        "2:2",
        "--rdzv_endpoint",
        f"127.0.0.1:{port}",
        "--rdzv_id",
        "strangers",
    )
    first = start_script(tmp_path, *options, "--node_rank", "0")
    second = None
    try:
        while not (places := listening(first.pid)):
            assert first.poll() is None, first.communicate()[0]
            time.sleep(0.02)
        assert places == [("127.0.0.1", port)]
        strangers.come(places, MANY)
        (tmp_path / "meet").touch()
        (tmp_path / "train").touch()
        second = start_script(tmp_path, *options, "--node_rank", "1")
        said = [run.communicate(timeout=90)[0] for run in (first, second)]
    finally:
        for run in (first, second):
            if run is not None:
                run.terminate()
                run.wait()
    assert first.returncode == second.returncode == 0 and all(
        f": {float(SUM)}" in text for text in said
    ), said
