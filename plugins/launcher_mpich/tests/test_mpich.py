"""What Hydra is given, and the program that stands between it and ssh."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ds_command_kit.hosts import Host
from ds_command_kit.launch import LaunchRequest
from ds_command_kit.show import CommandError
from ds_launcher_mpich.hydra import REACH, ends, explain, impi, mpich, mvapich

REQUEST = LaunchRequest(
    "train.py",
    hosts=(Host("h0", (0, 1)), Host("h1", (1,))),
    min_nodes=2,
    max_nodes=2,
    exported=(("KEY", "secret"),),
)


def shown(launcher: Any, capsys: Any, **changes: Any) -> str:
    assert launcher(dataclasses.replace(REQUEST, show=True, **changes)) == 0
    return str(capsys.readouterr().out)


def test_words(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name if name == "mpiexec" else None)
    monkeypatch.setattr(sys, "executable", "/python")
    said = shown(mpich, capsys, ssh_port=2222, launcher_args=("-iface", "eth1"))
    assert said.splitlines()[0] == (
        f"env 'HYDRA_LAUNCHER_EXTRA_ARGS=-I -S {REACH} -o BatchMode=yes -o ConnectTimeout=10 -o "
        "ServerAliveInterval=5 "
        "-o ServerAliveCountMax=3 -p 2222' mpiexec -launcher ssh -launcher-exec /python -genvlist "
        "DSCORE_AGENT -n 2 "
        "-ppn 1 -hosts h0,h1 -iface eth1 /python -m ds_cli.multi_host.agent --number-from PMI_RANK "
        "--settings-by-variable"
    )
    assert "secret" not in said


def test_whose_mpiexec(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setenv("I_MPI_ROOT", "/intel/mpi")
    assert " /intel/mpi/bin/mpiexec.hydra " in shown(impi, capsys)
    assert " mpiexec.hydra " in shown(mvapich, capsys)


@pytest.mark.parametrize("launcher", [mpich, impi, mvapich])
def test_what_it_cannot_do(launcher: Any) -> None:
    with pytest.raises(CommandError, match=f"launcher {launcher.__name__} needs --hostfile"):
        launcher(dataclasses.replace(REQUEST, hosts=()))


def test_reach_tells_of_a_bad_end(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\necho "$@"\nexit 255\n')
    ssh.chmod(0o755)
    words = [
        sys.executable,
        "-x",
        "-I",
        "-S",
        REACH,
        "-o",
        "BatchMode=yes",
        "-p",
        "22",
        "h7",
        "proxy",
        "a b",
    ]
    ended = subprocess.run(
        words, env={"PATH": f"{tmp_path}:/bin:/usr/bin"}, capture_output=True, check=False
    )
    assert ended.stdout == b"-x -o BatchMode=yes -p 22 h7 proxy a b\n"
    assert ended.returncode == 255
    assert ends(ended.stderr) == ("h7", 255)
    assert "lost host h7" in explain("h7", 255)
