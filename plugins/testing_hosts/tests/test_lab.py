"""Hosts in namespaces: what is each one's own, what their links do, and that nothing stays
behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ds_testing.processes import clean_environment
from ds_testing_hosts.lab import Host, Lab, LabError, Process

ECHO = """
import socket
server = socket.create_server(("", 4000))
print("up", flush=True)
while True:
    peer, _ = server.accept()
    while data := peer.recv(1 << 16):
        peer.sendall(data)
"""
ASK = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 4000), timeout=float(sys.argv[2]))
peer.settimeout(float(sys.argv[2]))
def ask(count):
    peer.sendall(b"x" * count)
    while count:
        count -= len(peer.recv(1 << 16))
ask(1)
started = time.monotonic()
ask(int(sys.argv[3]))
print(time.monotonic() - started)
"""
Labs = Callable[..., Lab]


def serve(host: Host) -> None:
    server = host.popen([sys.executable, "-I", "-S", "-c", ECHO])
    assert server.stdout and server.stdout.readline() == "up\n"


def ask(host: Host, name: str, *, wait: float = 30.0, count: int = 1, status: int = 0) -> str:
    return host.run(
        [sys.executable, "-I", "-S", "-c", ASK, name, str(wait), str(count)], status=status
    )


def sleepers(host: Host) -> list[Process]:
    """The processes of ``sleep``, once there is one that sleeps: on a busy machine it is a while on
    its way there.
    """
    while not (
        found := [p for p in host.processes() if p.words[:1] == ("sleep",) and p.state == "S"]
    ):
        time.sleep(0.01)
    return found


def test_what_is_its_own(lab: Labs, tmp_path: Path) -> None:
    made = lab("a", "b", shared=[tmp_path])
    a, b = made.hosts
    assert [host.run(["hostname"]) for host in made.everyone] == ["head\n", "a\n", "b\n"]
    assert a.run(["getent", "hosts", "b"]).split() == [b.address, "b"]
    assert a.run(["ls", "/sys/class/net"]).split() == ["eth0", "lo"]
    a.run(["tee", "/tmp/own", "/dev/shm/own", str(tmp_path / "shared")])
    assert (
        (a.root / "tmp/own").exists()
        and not (b.root / "tmp/own").exists()
        and not Path("/dev/shm/own").exists()
    )
    assert (tmp_path / "shared").exists() and b.run(["ls", str(tmp_path)]) == "shared\n"
    assert (
        a.run([sys.executable, "-c", "import os, ds_core; print(os.getcwd())"], cwd=tmp_path)
        == f"{tmp_path}\n"
    )
    with pytest.raises(AssertionError, match=r"cat nothing on a ended with 1:\n.*No such file"):
        a.run(["cat", "nothing"])
    a.disk("/tmp/small", size="64k")
    assert "No space left" in a.run(
        ["dd", "if=/dev/zero", "of=/tmp/small/file", "bs=128k", "count=1"], status=1
    )


def test_signals_reach_the_process_and_all_end_with_the_host(lab: Labs) -> None:
    a = lab("a").host("a")
    sleeper = a.popen(["sleep", "1000"], env=clean_environment(RANK="3"))
    [one] = sleepers(a)
    assert one.environ["RANK"] == "3" and one.state == "S"
    sleeper.terminate()
    assert sleeper.wait(timeout=30) == -signal.SIGTERM
    assert a.processes() == []
    stubborn = a.popen(["sh", "-c", "trap '' TERM; setsid sleep 1000 & wait"])
    pids = [process.pid for process in (*sleepers(a), *a.processes())]
    a.kill()
    assert stubborn.wait(timeout=30) == -signal.SIGKILL
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    with pytest.raises(LabError, match="host 'a' is off"):
        a.run(["true"])
    a.boot()
    assert a.run(["hostname"]) == "a\n"


def test_links(lab: Labs) -> None:
    a, b = lab("a", "b").hosts
    serve(b)
    before = b.received, b.sent
    ask(a, "b", count=200_000)
    after = b.received, b.sent
    counted = [now - then for now, then in zip(after, before, strict=True)]
    # The least is what was sent. The most is generous: on a busy machine the echo leaves in small
    # packets, each with its headers, and what is late is sent again.
    assert all(200_000 < count < 400_000 for count in counted), counted
    b.link(latency=0.02)
    assert float(ask(a, "b")) >= 0.04
    b.link(latency=0.001, loss=0.05)
    ask(a, "b", count=100_000)
    b.link(rate=8e6)
    assert float(ask(a, "b", count=300_000)) >= 0.2
    b.link()
    b.cut()
    assert "timed out" in ask(a, "b", wait=0.2, status=1) and "eth0" in b.run(
        ["ip", "link", "show", "up"]
    )
    b.mend()
    ask(a, "b")
    b.kill()
    assert "Error" in ask(a, "b", wait=0.2, status=1)
    b.boot()
    serve(b)
    ask(a, "b")


@pytest.mark.skipif(
    shutil.which("sshd", path="/usr/sbin") is None,
    reason="no OpenSSH server; Debian: openssh-server",
)
def test_ssh(lab: Labs) -> None:
    made = lab("a", "b", ssh=True)
    assert made.head.run(["ssh", "-o", "BatchMode=yes", "a", "ssh", "b", "hostname"]) == "b\n"
    made.host("b").stop_ssh()
    assert "Connection refused" in made.head.run(["ssh", "b", "hostname"], status=255)
    made.host("b").start_ssh()
    assert made.head.run(["ssh", "b", "hostname"]) == "b\n"


def test_nothing_stays_when_the_test_is_killed(lab: Labs) -> None:
    code = """
from ds_testing_hosts.lab import Lab
made = Lab("a", "b")
made.host("b").link(latency=0.001)
made.host("a").popen(["setsid", "sleep", "1000"])
while not made.host("a").processes(): pass
pids = [p.pid for h in made.everyone for p in h.processes()] + [h._on.pid for h in made.everyone]
print(made.switch.pid, *pids, flush=True)
input()
"""
    test = subprocess.Popen(
        [sys.executable, "-c", code],
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert test.stdout
    pids = [int(word) for word in test.stdout.readline().split()]
    assert len(pids) == 5 and all(Path(f"/proc/{pid}").exists() for pid in pids)
    os.kill(test.pid, signal.SIGKILL)
    test.communicate()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)
