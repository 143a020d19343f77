"""Several hosts: which are chosen, what their agents are given, and how the programs that reach
them end.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from ds_cli import main
from ds_cli.multi_host.agent import on_host
from ds_cli.run.host_choice import Choice, choose_hosts
from ds_command_kit.hosts import Host, settings_line
from ds_command_kit.hosts.settings import read_settings
from ds_command_kit.launch import LaunchRequest
from ds_command_kit.show import CommandError


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "hosts"
    file.write_text("# ours\nh0 slots=4\n\nh1 slots=2  # small\n")
    return file


def asked(text: str, monkeypatch: Any) -> tuple[str, LaunchRequest]:
    """The launcher and what it is given for these words of ``dscore run``."""
    seen: list[tuple[str, LaunchRequest]] = []
    monkeypatch.setattr(
        "ds_cli.run.command.find_launcher",
        lambda name: lambda request: seen.append((name, request)) or 0,
    )
    monkeypatch.setattr(
        sys, "argv", ["dscore", "run", *shlex.split(text), "--no-python", sys.executable]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0 or not seen
    if not seen:
        raise CommandError(str(ended.value.code))
    return seen[0]


# -- which hosts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "launcher", "given"),
    [
        (
            "",
            "ssh",
            {
                "hosts": (Host("h0", (0, 1, 2, 3)), Host("h1", (0, 1))),
                "min_nodes": 2,
                "max_nodes": 2,
            },
        ),
        ("-i h0:1,3@h1", "ssh", {"hosts": (Host("h0", (1, 3)), Host("h1", (0, 1)))}),
        ("-e h0:0,2", "ssh", {"hosts": (Host("h0", (1, 3)), Host("h1", (0, 1)))}),
        ("--num_gpus 1 --launcher Pdsh", "Pdsh", {"hosts": (Host("h0", (0,)), Host("h1", (0,)))}),
        (
            "--num_nodes 1 --ssh_port 23",
            "ssh",
            {"hosts": (Host("h0", (0, 1, 2, 3)),), "ssh_port": 23},
        ),
        (
            "--no_ssh --node_rank 1",
            "local",
            {"node_rank": 1, "nproc": 2, "master_addr": "h0", "max_nodes": 2},
        ),
        ("--elastic_training", "ssh", {"min_nodes": 1, "max_nodes": 2}),
        ("--launcher_args '-v -o \"A b\"'", "ssh", {"launcher_args": ("-v", "-o", "A b")}),
    ],
)
def test_documented_flags(
    hosts: Path, text: str, launcher: str, given: dict[str, Any], monkeypatch: Any
) -> None:
    name, request = asked(f"-H {hosts} {text}", monkeypatch)
    assert name == launcher
    assert {field: getattr(request, field) for field in given} == given


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("-i h0 -e h1", "give one of them"),
        ("-i h2", "'h2'"),
        ("-i h0:7", "[7]"),
        ("-i h0 --num_gpus 1", "do not go together"),
        ("--num_nodes 3", "3 hosts are asked for, but the hostfile has 2"),
        ("--num_gpus 3", "'h1' has 2 slots"),
        ("--no_ssh", "--node-rank"),
        ("--no_ssh --node_rank 2", "use 0 to 1"),
        ("--launcher local", "this machine only"),
        ("--launcher ssh --node_rank 1", "leave out"),
        ("--min_elastic_nodes 1", "--elastic-training"),
        ("--elastic_training --min_elastic_nodes 3 --max_elastic_nodes 2", "more than 2"),
        ("-H nowhere", "no hostfile 'nowhere'"),
    ],
)
def test_words_that_do_not_fit(
    hosts: Path, text: str, said: str, monkeypatch: Any, capsys: Any
) -> None:
    with pytest.raises(CommandError, match="^2$"):
        asked(text if text.startswith("-H") else f"-H {hosts} {text}", monkeypatch)
    assert said in capsys.readouterr().err


def test_a_hostfile_that_is_no_regular_file_means_this_machine() -> None:
    assert choose_hosts(Choice(hostfile="/dev/null")) == ()


def test_one_host_that_is_this_machine_is_local_unless_forced(
    tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "one").write_text("localhost slots=2\n")
    name, request = asked(f"-H {tmp_path / 'one'}", monkeypatch)
    assert (name, request.nproc, request.max_nodes, request.node_rank) == ("local", 2, 1, None)
    assert asked(f"-H {tmp_path / 'one'} --force_multi", monkeypatch)[0] == "ssh"


# -- what their agents are given -------------------------------------------------------------------


def test_settings_arrive_and_each_host_takes_its_own(tmp_path: Path) -> None:
    request = LaunchRequest(
        "x.py",
        ("--a", "b c"),
        hosts=(Host("u@h0", (0, 2)), Host("h1")),
        min_nodes=2,
        max_nodes=2,
        cores=(1, 2),
        exported=(("TOKEN", "hidden"),),
        launcher_args=("-v",),
    )
    got = read_settings(settings_line(request).strip())
    assert got.request == dataclasses.replace(request, exported=(), launcher_args=())
    assert (got.folder, got.variables) == (os.getcwd(), {"TOKEN": "hidden"})
    assert "hidden" not in repr(request)
    first = on_host(got.request, 0)
    second = on_host(got.request, 1)
    assert (first.slots, first.nproc, first.node_rank, first.master_addr) == ((0, 2), 2, 0, "h0")
    assert (second.slots, second.nproc, second.node_rank, second.master_addr) == (
        None,
        None,
        1,
        "h0",
    )
    with pytest.raises(CommandError, match="host 2 of 2"):
        on_host(got.request, 2)
    for bad in (b"", b"eJw=", b"\x00"):
        with pytest.raises(CommandError, match="same version"):
            read_settings(bad)


# -- what is shown instead of a run ---------------------------------------------------------------


def test_show_runs_nothing_on_this_machine_either(
    tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    (tmp_path / "x.py").write_text("raise SystemExit('must not run')")
    monkeypatch.setattr(
        sys, "argv", ["dscore", "run", "--show", "--nproc", "2", str(tmp_path / "x.py"), "a b"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert (
        capfd.readouterr().out
        == f"this machine: 2 processes\neach process: python {tmp_path / 'x.py'} 'a b'\n"
    )
