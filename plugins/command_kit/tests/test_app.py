"""The program: own commands, those of plugins, and groups that are open to them."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import typer
from ds_command_kit.app import OpenGroup, find_command, make_app
from ds_command_kit.show import CommandError
from typer.testing import CliRunner

from ds_core.entries import CommandEntry
from ds_core.plugins import BACKENDS, Found
from ds_core.plugins import registry as P


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> dict[str, CommandEntry]:
    """The commands of the only plugin that is installed, to be filled."""
    offered: dict[str, CommandEntry] = {}
    module = types.ModuleType("made_commands")
    group = typer.Typer(cls=OpenGroup)
    group.callback()(lambda: None)
    vars(module).update(
        ds_commands=lambda: offered,
        hello=lambda name="you": typer.echo(f"hello {name}"),
        group=group,
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = Found("made", BACKENDS, module.__name__, "ds-made", "1.0")
    monkeypatch.setattr(P, "discover", lambda: (found,))
    return offered


def call(app: typer.Typer, *words: str) -> Any:
    return CliRunner().invoke(app, list(words), prog_name="dscore")


def test_own_commands_come_first_and_need_no_search(
    commands: dict[str, CommandEntry], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands["afternoon"] = CommandEntry("made_commands:hello", "Of the plugin.")
    own = {"greet": CommandEntry("made_commands:hello", "Own.")}
    lines = call(make_app(own), "--help").output.splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  ") and line.split()]
    assert names.index("greet") < names.index("afternoon")
    monkeypatch.setattr(P, "discover", lambda: pytest.fail("plugins were searched"))
    assert call(make_app(own), "greet").output == "hello you\n"


def test_a_group_has_the_commands_of_other_packages(commands: dict[str, CommandEntry]) -> None:
    commands["tools"] = CommandEntry("made_commands:group", "A group.")
    commands["tools hello"] = CommandEntry("made_commands:hello", "Of the plugin.")
    assert "Of the plugin." in call(make_app(), "tools", "--help").output
    assert call(make_app(), "tools", "hello").output == "hello you\n"


def test_a_command_is_found_by_name(commands: dict[str, CommandEntry]) -> None:
    commands["hello"] = CommandEntry("made_commands:hello", "Of the plugin.")
    assert find_command("hello").name == "hello"
    with pytest.raises(CommandError, match=r"No such command 'helo'\. Did you mean 'hello'\?"):
        find_command("helo")
