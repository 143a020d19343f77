"""What pdsh is given, and what its words mean."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
from ds_command_kit.hosts import Host
from ds_command_kit.launch import LaunchRequest
from ds_command_kit.show import CommandError
from ds_launcher_pdsh.pdsh import command, ends, explain, launch

REQUEST = LaunchRequest(
    "train.py",
    hosts=(Host("h0", (0, 1)), Host("h1", (1,))),
    min_nodes=2,
    max_nodes=2,
    exported=(("KEY", "secret"),),
)


def test_words(monkeypatch: Any) -> None:
    monkeypatch.setenv("PDSH_SSH_ARGS_APPEND", "-o StrictHostKeyChecking=no")
    monkeypatch.setattr(sys, "executable", "/env 1%/python")
    request = dataclasses.replace(REQUEST, ssh_port=2222, launcher_args=("-t", "5"))
    env, variable, *pdsh, remote = command(request)
    assert env == "env"
    name, _, ssh = variable.partition("=")
    assert name == "PDSH_SSH_ARGS_APPEND"
    assert ssh == (
        "-o StrictHostKeyChecking=no -o BatchMode=yes -o ConnectTimeout=10 -o "
        "ServerAliveInterval=5 "
        "-o ServerAliveCountMax=3 -p 2222"
    )
    assert pdsh == ["pdsh", "-R", "ssh", "-S", "-N", "-b", "-f", "2", "-w", "h0,h1", "-t", "5"]
    start, settings = remote.rsplit(" --settings ", 1)
    assert start == "'/env 1%%/python' -m ds_cli.multi_host.agent --number %n"
    packed, *lifeline = settings.split()
    assert lifeline == ["--lifeline", "end"]
    assert "secret" not in packed


def test_show_starts_nothing(capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("PATH", "")
    assert launch(dataclasses.replace(REQUEST, show=True)) == 0
    said = capsys.readouterr().out
    assert "pdsh -R ssh" in said
    assert "host 1: h1, slots 1" in said
    assert "secret" not in said


def test_ends_of_single_hosts() -> None:
    assert ends(b"pdsh@head: gpu-1: ssh exited with exit code 255\n") == ("gpu-1", 255)
    assert ends(b"pdsh: command not found\n") is None
    assert "lost host gpu-1" in explain("gpu-1", 255)
    assert "same path" in explain("gpu-1", 127)
    assert explain("gpu-1", 3) == ""


@pytest.mark.parametrize(
    ("change", "said"), [({"hosts": ()}, "--hostfile"), ({"min_nodes": 1}, "elastic")]
)
def test_what_it_cannot_do(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CommandError, match=said):
        command(dataclasses.replace(REQUEST, **change))
