"""``dscore run``: who can reach a run, and how two hosts meet."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from cli_runs import command, pids, wait_until
from ds_cli.local.launcher import launch
from ds_command_kit.launch import LaunchRequest
from ds_testing import processes

pytestmark = pytest.mark.usefixtures("one_process_by_default")


def listening(pid: int) -> set[str]:
    """The addresses, in hexadecimal as the kernel writes them, at which a process listens."""
    links = [os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir() if os.path.islink(f)]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="Linux tells who listens where")
def test_on_one_machine_nothing_listens_beyond_it(script: Any, tmp_path: Path) -> None:
    """The launcher's store and what the ranks talk over, in a script that uses torch alone."""
    body = (
        "import torch.distributed as dist\ndist.init_process_group('gloo')\nleave('ready', "
        "1)\ntime.sleep(600)"
    )
    running = command(tmp_path, "--nproc", "2", script(body))
    wait_until(lambda: {"ready0", "ready1"} <= set(pids(tmp_path)), 100)
    seen = pids(tmp_path)
    addresses = [listening(pid) for pid in (running.pid, seen["rank0"], seen["rank1"])]
    running.terminate()
    running.communicate(timeout=300)
    assert addresses == [{"0100007F"}] * 3


def test_what_strangers_write_where_machines_meet_is_not_unpickled(
    script: Any, tmp_path: Path
) -> None:
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

    mark = tmp_path / "ran"
    port = processes.free_port()
    words = ["--nnodes", "2", "--nproc", "1", "--rdzv-endpoint", f"127.0.0.1:{port}", script("")]
    running = command(tmp_path, *words)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    backend = C10dRendezvousBackend(store, "dscore")
    harmful = f"cposix\nsystem\n(Vtouch {mark}\ntR.".encode()

    def write() -> bool:
        found = backend.get_state()
        answer = found and backend.set_state(harmful, found[1])
        return bool(answer and answer[2])

    wait_until(write)
    _, err = running.communicate(timeout=300)
    assert running.returncode == 1
    assert "what lies at the --rdzv-endpoint is not the state of a dscore run" in err
    assert not mark.exists()


@pytest.mark.slow
def test_a_port_can_be_chosen_and_one_in_use_is_named(
    script: Any, tmp_path: Path, capfd: Any
) -> None:
    port = processes.free_port()
    assert launch(LaunchRequest(script('print(os.environ["MASTER_PORT"])'), master_port=port)) == 0
    assert capfd.readouterr().out.split() == [str(port)]
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        running = command(tmp_path, "--master-port", str(taken), str(tmp_path / "script.py"))
        _, err = running.communicate(timeout=300)
    assert running.returncode == 1
    assert f"port {taken} of 127.0.0.1 is already in use" in err
    assert "choose another one with MASTER_PORT or --master-port" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    "meet",
    [
        pytest.param("--node-rank 0 --master-addr 127.0.0.1 --master-port", marks=pytest.mark.slow),
        "--rdzv-endpoint",
    ],
)
def test_a_launcher_that_waits_for_other_machines_can_be_stopped(
    script: Any, tmp_path: Path, meet: str
) -> None:
    port = processes.free_port()
    where = str(port) if meet.endswith("--master-port") else f"127.0.0.1:{port}"
    running = command(tmp_path, "--nnodes", "2", "--nproc", "1", *meet.split(), where, script(""))

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(listens)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=300)
    assert (running.returncode, out) == (130, "")
    assert err == "dscore: stopped by SIGINT; all processes were ended\n"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["static", pytest.param("endpoint", marks=pytest.mark.slow)])
def test_two_machines_meet(script: Any, tmp_path: Path, way: str) -> None:
    file = script('print(os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"])')
    port = str(processes.free_port())
    meet = {
        "static": ["--master-addr", "127.0.0.1", "--master-port", port],
        "endpoint": ["--rdzv-endpoint", f"127.0.0.1:{port}"],
    }[way]
    both = [
        command(tmp_path, "--nnodes", "2", "--node-rank", rank, "--nproc", "1", *meet, file)
        for rank in ("0", "1")
    ]
    said = [running.communicate(timeout=300) for running in both]
    assert [running.returncode for running in both] == [0, 0], said
    assert sorted(out for out, _ in said) == ["0 2 0\n", "1 2 0\n"]
