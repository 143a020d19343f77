"""What mpirun is given."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
from ds_command_kit.hosts import Host
from ds_command_kit.launch import LaunchRequest
from ds_command_kit.show import CommandError
from ds_launcher_openmpi.openmpi import command, launch

REQUEST = LaunchRequest(
    "train.py",
    hosts=(Host("h0", (0, 1)), Host("h1", (1,))),
    min_nodes=2,
    max_nodes=2,
    exported=(("KEY", "secret"),),
)


def test_words(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        "shutil.which", lambda name: "/usr/bin/mpirun" if name == "mpirun" else None
    )
    words = command(
        dataclasses.replace(REQUEST, ssh_port=2222, launcher_args=("--allow-run-as-root",))
    )
    agent = [sys.executable, *["-m", "ds_cli.multi_host.agent", "--number"]]
    assert words == [
        "env",
        "OMPI_MCA_plm_rsh_args=-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5"
        " -o ServerAliveCountMax=3 -p 2222",
        "OMPI_MCA_odls_base_sigkill_timeout=3",
        "OMPI_MCA_oob_tcp_keepalive_time=5",
        "OMPI_MCA_oob_tcp_keepalive_intvl=3",
        "OMPI_MCA_oob_tcp_keepalive_probes=3",
        *["mpirun", "-q", "--bind-to", "none", "--allow-run-as-root"],
        *["-np", "1", "--host", "h0", "-x", "DSCORE_AGENT"],
        *(*agent, "0", "--settings-by-variable"),
        *[":", "-np", "1", "--host", "h1", "-x", "DSCORE_AGENT"],
        *(*agent, "1", "--settings-by-variable"),
    ]


def test_show_starts_nothing(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "")
    assert launch(dataclasses.replace(REQUEST, show=True)) == 0
    said = capsys.readouterr().out
    assert "mpirun -q" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hosts": ()}, "--hostfile"),
        ({"min_nodes": 1}, "elastic"),
        ({"hosts": (Host("me@h0", (0,)),)}, "'me@h0'"),
    ],
)
def test_what_it_cannot_do(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        command(dataclasses.replace(REQUEST, **change))
