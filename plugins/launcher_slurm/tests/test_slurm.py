"""What srun is given, and which nodes are used."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
from ds_command_kit.hosts import Host
from ds_command_kit.launch import LaunchRequest
from ds_command_kit.show import CommandError
from ds_launcher_slurm.slurm import command, ends, in_allocation, launch

REQUEST = LaunchRequest("train.py", min_nodes=0, max_nodes=0, exported=(("KEY", "secret"),))
NODES = ["n1", "n2", "n3"]


def names(**changes: Any) -> list[str]:
    return [
        host.name for host in in_allocation(dataclasses.replace(REQUEST, **changes), NODES).hosts
    ]


def test_nodes() -> None:
    assert names() == NODES
    assert names(min_nodes=2, max_nodes=2) == ["n1", "n2"]
    chosen = in_allocation(
        dataclasses.replace(REQUEST, hosts=(Host("n3", (1,)), Host("n1", (0, 1)))), NODES
    )
    assert chosen.hosts == (Host("n1", (0, 1)), Host("n3", (1,)))  # as srun numbers them
    assert chosen.min_nodes == chosen.max_nodes == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"hosts": (Host("login", (0,)),)},
            "'login' of the hostfile is not in the allocation: n1, n2, n3",
        ),
        (
            {"min_nodes": 4, "max_nodes": 4},
            "4 hosts are asked for, but the allocation has 3",
        ),
        ({"min_nodes": 1, "max_nodes": 3}, "elastic"),
    ],
)
def test_what_it_cannot_do(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        in_allocation(dataclasses.replace(REQUEST, **change), NODES)


def test_words() -> None:
    request = in_allocation(dataclasses.replace(REQUEST, launcher_args=("--gpu-bind=none",)), NODES)
    assert command(request) == [
        *[
            "srun",
            "--nodes",
            "3",
            "--ntasks",
            "3",
            "--ntasks-per-node",
            "1",
            "--nodelist",
            "n1,n2,n3",
        ],
        *[
            "--export=ALL",
            "--mpi=none",
            "--cpu-bind=none",
            "--overlap",
            "--kill-on-bad-exit=0",
            "--gpu-bind=none",
        ],
        *(sys.executable, "-m", "ds_cli.multi_host.agent"),
        *["--number-from", "SLURM_NODEID", "--settings-by-stdin", "--lifeline", "beats"],
    ]


def test_show_and_an_allocation(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    for name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CommandError, match="salloc -N 2"):
        launch(REQUEST)
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$3-1 $3-2"\n')
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "gpu")
    assert launch(dataclasses.replace(REQUEST, show=True)) == 0
    said = capsys.readouterr().out
    assert "--nodelist gpu-1,gpu-2" in said
    assert "host 1: gpu-2, one process per accelerator" in said
    assert "secret" not in said


def test_ends_of_single_nodes() -> None:
    assert ends(b"srun: error: n2: task 1: Exited with exit code 3\n") == ("n2", 3)
    assert ends(b"srun: error: n[1-2]: tasks 0-1: Exited with exit code 1\n") == ("n[1-2]", 1)
    assert ends(b"srun: error: something else\n") is None
