"""What travels to the agent of each host."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from ds_command_kit.hosts import Host, settings_line
from ds_command_kit.hosts.settings import exported, read_settings
from ds_command_kit.launch import LaunchRequest
from ds_command_kit.show import CommandError


def test_settings_arrive_without_what_is_only_the_launchers() -> None:
    request = LaunchRequest(
        "x.py",
        ("--a", "b c"),
        hosts=(Host("u@h0", (0, 2)), Host("h1")),
        cores=(1, 2),
        exported=(("TOKEN", "hidden"),),
        launcher_args=("-v",),
    )
    got = read_settings(settings_line(request).strip())
    assert got.request == dataclasses.replace(request, exported=(), launcher_args=())
    assert (got.folder, got.variables) == (os.getcwd(), {"TOKEN": "hidden"})
    assert "hidden" not in repr(request)


@pytest.mark.parametrize("bad", [b"", b"eJw=", b"\x00"])
def test_settings_of_another_version_are_refused(bad: bytes) -> None:
    with pytest.raises(CommandError, match="same version"):
        read_settings(bad)


def test_variables_for_every_host(tmp_path: Path, monkeypatch: Any) -> None:
    home = tmp_path / "home"
    here = tmp_path / "here"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    (home / ".deepspeed_env").write_text("# ours\nA=1\nexport B=2 = 3\n")
    (here / ".deepspeed_env").write_text("A=4\n")
    found = dict(
        exported({"NCCL_X": "1", "MLFLOW_URL": "u", "AWS_SECRET": "s", "CUDA_VISIBLE_DEVICES": "1"})
    )
    assert found == {"NCCL_X": "1", "MLFLOW_URL": "u", "A": "4", "B": "2 = 3"}
    (here / "bad").write_text("\nhidden word\n")
    with pytest.raises(CommandError, match="bad, line 2 is not KEY=VALUE") as error:
        exported({"DS_ENV_FILE": "bad"})
    assert "hidden" not in str(error.value)
    with pytest.raises(CommandError, match="no such file"):
        exported({"DS_ENV_FILE": "nowhere"})
