"""The launcher on a real Ray cluster of three nodes: output, failures, and nothing left when
anything is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ds_testing_hosts.lab import Lab
from ds_testing_hosts.ray_hosts import start_ray

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(
        find_spec("ray") is None, reason="ray is not installed; make test-hosts brings it"
    ),
]

SCRIPT = """
import os, socket, sys, time
rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
print("rank", rank, "of", size, "on", socket.gethostname(), sys.argv[1:], os.environ.get("DS_SAID"), flush=True)
if sys.argv[1] == "fail" and rank == "3":
    time.sleep(0.5)
    raise ValueError("rank three is tired")
if sys.argv[1] != "end":
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Path]]:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "script.py").write_text(SCRIPT)
    with Lab("a", "b", "c", shared=[folder]) as lab:
        start_ray(lab, folder)
        yield lab, folder


def words(
    folder: Path, *arguments: str, options: tuple[str, ...] = ("--nnodes", "2", "--nproc", "2")
) -> list[str]:
    run = [
        sys.executable,
        "-m",
        "ds_cli",
        "run",
        "--launcher",
        "ray",
        "--grace",
        "2",
        "--notice",
        "2",
        *options,
    ]
    return [*run, str(folder / "script.py"), *arguments]


def ranks(lab: Lab, off: str = "") -> list[Any]:
    """The processes of ranks, agents and their watchers on all hosts."""
    own = ("script.py", "ds_cli.multi_host.agent", "orphan_cleanup.py")
    running = [p for host in lab.everyone if host.name != off for p in host.processes()]
    return [p for p in running if any(w in " ".join(p.words) for w in own)]


def wait_until(true: Callable[[], Any], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def test_ranks_run_on_a_node_each_and_say_so(cluster: tuple[Lab, Path]) -> None:
    lab, folder = cluster
    said = lab.head.run(words(folder, "end", "0.1 0.2", ""), env={"DS_SAID": "é"})
    lines = sorted(line for line in said.splitlines() if line.startswith("rank"))
    assert [line.split()[1] for line in lines] == ["0", "1", "2", "3"]
    assert all(line.endswith("['end', '0.1 0.2', ''] é") for line in lines)
    hosts = [line.split()[5] for line in lines]
    assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
    assert not ranks(lab)


def test_hosts_of_a_hostfile_in_its_order(cluster: tuple[Lab, Path]) -> None:
    lab, folder = cluster
    (folder / "hosts").write_text(f"c slots=1\n{lab.host('a').address} slots=2\n")
    options = ("--hostfile", str(folder / "hosts"))
    lines = sorted(
        line
        for line in lab.head.run(words(folder, "end", options=options)).splitlines()
        if "rank" in line
    )
    assert [line.split()[5] for line in lines] == ["c", "a", "a"]
    (folder / "hosts").write_text("c slots=1\nz slots=1\n")
    said = lab.head.run(words(folder, "end", options=options), status=2)
    assert "host 'z' is not a node of the Ray cluster" in said


def test_one_that_fails_ends_all_with_its_traceback_and_code(cluster: tuple[Lab, Path]) -> None:
    lab, folder = cluster
    start = time.monotonic()
    said = lab.head.run(words(folder, "fail"), status=1)
    assert time.monotonic() - start < 30
    assert said.count("ValueError: rank three is tired") >= 1 and said.count("Traceback") == 1
    (line,) = (
        line
        for line in said.splitlines()
        if line.startswith("dscore: rank 3 of 4 failed with exit code 1")
    )
    assert any(f"on {host.name})" in line for host in lab.hosts)
    assert not ranks(lab)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("whom", ["launcher", "driver"])
def test_nothing_is_left_when_the_launcher_is_killed(
    cluster: tuple[Lab, Path], whom: str, number: int
) -> None:
    lab, folder = cluster
    run = lab.head.popen(words(folder, "wait"))
    wait_until(
        lambda: sum("wait" in p.words for p in ranks(lab)) >= 4, 60, "the ranks did not start"
    )
    if whom == "launcher":
        run.send_signal(number)
    else:
        (driver,) = (p for p in lab.head.processes() if "ds_launcher_ray.driver" in p.words)
        os.kill(driver.pid, number)
    said = run.communicate(timeout=60)[0]
    assert run.returncode not in (0, None), said
    if (whom, number) == ("launcher", signal.SIGTERM):
        assert run.returncode == 143 and "stopped by SIGTERM" in said
    wait_until(lambda: not ranks(lab), 30, f"left: {[p.words for p in ranks(lab)]}")


def test_a_node_that_dies_is_named(cluster: tuple[Lab, Path]) -> None:
    """The last test: the cluster has one node less afterwards."""
    lab, folder = cluster
    (folder / "hosts").write_text("a slots=1\nb slots=1\n")
    run = lab.head.popen(words(folder, "wait", options=("--hostfile", str(folder / "hosts"))))
    wait_until(
        lambda: sum("wait" in p.words for p in ranks(lab)) >= 2, 60, "the ranks did not start"
    )
    start = time.monotonic()
    lab.host("b").crash()
    said = run.communicate(timeout=90)[0]
    assert run.returncode == 1 and "lost host b" in said, said
    assert time.monotonic() - start < 30
    wait_until(lambda: not ranks(lab, off="b"), 30, "ranks are left")
