"""``dscore doctor --hostfile``: hosts that differ, a slow link, hosts that are not reached (in a
lab).
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ds_cli.doctor import probing
from ds_cli.doctor.host_checks import link_rows, slow_links
from ds_cli.doctor.host_doctor import Examination, examine_hosts
from ds_cli.doctor.probing import Link, rounds
from ds_command_kit.hosts.hostfile import Host
from ds_testing_hosts.lab import Lab

TORCH = """
class cuda:
    is_available = staticmethod(lambda: False)
"""


@pytest.fixture
def lab_reach(
    lab: Callable[..., Lab], tmp_path: Path, monkeypatch: Any
) -> tuple[Lab, Callable[..., Any]]:
    """Hosts a, b and c with a torch that costs nothing, b's older, as is one of its packages; and
    the way to them.
    """
    monkeypatch.setattr(probing, "MEASURE_SECONDS", 0.1)
    for host, torch, package in (
        ("a", "2.13.0", "1.0"),
        ("b", "2.6.0", "0.9"),
        ("c", "2.13.0", "1.0"),
    ):
        (tmp_path / host / "torch").mkdir(parents=True)
        (tmp_path / host / "torch" / "__init__.py").write_text(f"__version__ = {torch!r}\n{TORCH}")
        (tmp_path / host / "torch" / "distributed.py").touch()
        info = tmp_path / host / "ds_odd.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ds-odd\nVersion: {package}\n")
        (info / "entry_points.txt").write_text("[ds_core.backends]\nodd = json\n")
    made = lab("a", "b", "c", shared=[tmp_path])

    def reach(name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        if name == "d":
            refused = "echo 'ssh: connect to host d port 22: Connection refused' >&2; exit 255"
            return subprocess.Popen(["sh", "-c", refused], stdin=pipe, stdout=pipe, stderr=pipe)
        env = {"PYTHONPATH": str(tmp_path / name)}
        process: Any = made.host(name).popen(
            list(command), env=env, text=False, stdin=pipe, stdout=pipe, stderr=pipe
        )
        return process

    return made, reach


def said(found: Examination, part: str) -> list[tuple[str, str]]:
    return [(f.level, f.found) for f in found.findings if f.part == part]


def test_hosts_that_differ_a_slow_link_and_a_host_that_is_down(lab_reach: tuple[Lab, Any]) -> None:
    lab, reach = lab_reach
    lab.host("c").link(rate=2e7)
    hosts = [Host("a", (0, 1)), Host("b", (0,)), Host("c", (0,)), Host("d", (0,))]
    with lab.host("a").popen(["python3", "-c", HOLD], stdin=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == "here\n"
        found = examine_hosts(hosts, reach, 29500)
        holder.kill()
    assert said(found, "d") == [
        ("fault", "not reached: ssh: connect to host d port 22: Connection refused")
    ]
    assert ("fault", "torch 2.6.0, the others have 2.13.0") in said(found, "b")
    assert ("fault", "ds-odd 0.9, the others have 1.0") in said(found, "b")
    assert {
        part
        for f in found.findings
        for part in [f.part]
        if "torch" in f.found or "ds-odd" in f.found
    } == {"b"}
    (port,) = (text for _, text in said(found, "a") if "29500" in text)
    assert "Address already in use" in port and "pid" in port
    (slow,) = (text for level, text in said(found, "c") if "slow" in text)
    assert slow.startswith("all its links are slow: ")
    rates = {(link.source, link.target): link.rate * 8 for link in found.links}
    assert len(rates) == 6 and min(rates["a", "b"], rates["b", "a"]) > 1e8
    assert all(rate < 4e7 for ends, rate in rates.items() if "c" in ends)


@pytest.mark.slow
def test_a_link_that_nothing_passes(lab_reach: tuple[Lab, Any]) -> None:
    """The hosts answer, but one cannot reach another: the link is named, and the others are
    measured.
    """
    lab, reach = lab_reach
    lab.host("a").run(["ip", "route", "add", "unreachable", lab.host("b").address])
    found = examine_hosts([Host("a"), Host("b"), Host("c")], reach, 29500)
    (network,) = said(found, "network")
    assert network[0] == "fault" and network[1].startswith(
        ("a cannot connect to b: ", "b cannot connect to a: ")
    )
    assert {(link.source, link.target) for link in found.links if link.error} == {
        ("a", "b"),
        ("b", "a"),
    }
    assert (
        sum(not link.error and link.rate > 0 and link.round_trip > 0 for link in found.links) == 4
    )


def test_every_pair_once_and_no_host_twice_at_a_time() -> None:
    for count in range(9):
        turns = list(rounds(range(count)))
        assert all(len(set(itertools.chain(*turn))) == 2 * len(turn) for turn in turns)
        pairs = sorted(tuple(sorted(pair)) for turn in turns for pair in turn)
        assert pairs == list(itertools.combinations(range(count), 2))


def test_what_is_said_of_slow_links() -> None:
    """One link is named as a link, a host by itself, and what is merely a little slower not at
    all."""

    def parts(rates: dict[str, float], trips: dict[str, float]) -> list[str]:
        ends = [(a, b) for a in "abcd" for b in "abcd" if a != b]
        links = [
            Link(a, b, rates.get(a + b, 1e8), trips.get("".join(sorted(a + b)), 1e-3))
            for a, b in ends
        ]
        return [finding.part for finding in slow_links(links)]

    assert parts({}, {}) == []
    assert parts({"ab": 6e7, "cd": 2e8}, {"ab": 0.002}) == []
    assert parts({"ab": 1e7}, {}) == ["a -> b"]
    assert parts({"ab": 1e7, "ac": 1e7, "ad": 1e7}, {}) == ["a"]  # it sends slowly
    assert parts({"ab": 1e7, "ac": 1e7, "ad": 1e7, "bc": 1e7}, {}) == ["a", "b -> c"]
    assert parts({}, {"cd": 0.05}) == ["c - d"]
    assert parts({}, {"ad": 0.05, "bd": 0.05, "cd": 0.05}) == ["d"]
    rows = link_rows(
        [Link("a", "b", 1.25e8, 0.0012), Link("b", "a", error="refused")], ["a", "b", "c"]
    )
    assert rows == (
        ["from \\ to", "a", "b"],
        [["a", "", "1 Gbit/s  1.20 ms"], ["b", "no connection", ""]],
    )


@pytest.mark.hosts
def test_the_command_over_ssh(lab: Callable[..., Lab], tmp_path: Path) -> None:
    """Real ssh servers, of which one is down and one has another host key than the one that is
    known.
    """
    made = lab("a", "b", "c", ssh=True, shared=[tmp_path])
    made.host("c").stop_ssh()
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\nc slots=2\n")
    words = [sys.executable, "-m", "ds_cli", "doctor", "--hostfile", str(tmp_path / "hosts")]
    shown = made.head.run(words, status=1)
    (fault,) = (line for line in shown.splitlines() if line.startswith("fault"))
    assert "c: not reached: " in fault and "Connection refused" in fault
    found = json.loads(made.head.run([*words, "--json", "--exclude", "c"]))
    assert [row["name"] for row in found["hosts"]] == ["a", "b"]
    assert all(row["rate"] > 0 for row in found["links"]) and len(found["links"]) == 2


HOLD = (
    "import socket, sys; s = socket.create_server(('', 29500)); print('here', flush=True); "
    "sys.stdin.read()"
)
