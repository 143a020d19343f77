"""old-launcher against the contracts of plugins and launchers."""

from __future__ import annotations

import pytest
from ds_cli.hosts import Host
from ds_cli.launch import LaunchRequest
from ds_cli.show import CommandError
from ds_testing import LauncherConformance, PluginConformance
from old_launcher.launcher import command, start


class TestPlugin(PluginConformance):
    entry_point = "old_launcher.plugin"


class TestLauncher(LauncherConformance):
    """The containers are this machine: a stand-in for docker drops "exec -i NAME" and runs the rest."""

    load = "old_launcher.launcher:start"
    hosts = ("one", "two")
    nproc = 1
    programs = {"docker": 'shift 3; exec "$@"'}


def test_more_options_of_the_program() -> None:
    request = LaunchRequest("train.py", hosts=(Host("one"),), launcher_args=("--user", "me"))
    assert command(request, 0)[:6] == ["docker", "exec", "-i", "--user", "me", "one"]


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(CommandError, match="needs --hostfile"):
        start(LaunchRequest("train.py"))
