"""The help of every installed command: it fits 80 columns, and its examples are true."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import Any

import pytest
from all_commands import contexts, helps, sections
from cli_runs import dscore
from ds_cli.plugin import ds_commands
from ds_command_kit.app import find_command
from ds_command_kit.help import EXAMPLES, EXIT_CODES

from ds_core.errors import DSError


def commands() -> dict[str, Any]:
    """The contexts of commands, without groups."""
    return {n: c for n, c in contexts().items() if not hasattr(c.command, "list_commands")}


def options(ctx: Any) -> list[str]:
    """All names of the options of a command, the help's among them."""
    params = ctx.command.get_params(ctx)
    shown = (p for p in params if p.param_type_name == "option" and not p.hidden)
    return [name for p in shown for name in (*p.opts, *p.secondary_opts)]


def test_every_help_fits_80_columns_and_cuts_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = contexts()
    assert {"", "run", "config", "config check", "plugins show", "doctor"} <= found.keys()
    texts = helps()
    for name, text in texts.items():
        lines = text.splitlines()
        assert [line for line in lines if len(line) > 80] == [], name
        assert "…" not in text and not any(
            word.endswith("...") and word.strip("[].").islower() for word in text.split()
        ), name
        words = {word.strip(",") for word in text.split()}
        assert set(options(found[name])) <= words, name


def test_every_command_has_its_exit_codes_and_true_examples() -> None:
    for name, ctx in commands().items():
        said = sections(ctx)
        assert said.get(EXIT_CODES), name
        assert said[EXIT_CODES][0].startswith("0: "), name
        assert said[EXAMPLES][0].startswith(f"dscore {name}".removesuffix(" show")), name
        for example in said[EXAMPLES]:
            words = shlex.split(example.partition(" > ")[0])
            assert words[0] == "dscore"
            _parse(words[1:])


def _parse(words: list[str]) -> None:
    """Raises what typer says of words that are wrong, and runs nothing."""
    command = find_command(words[0]) if words[0] not in ds_commands() else None
    if command is None:
        command = contexts()[words[0]].command
    ctx = command.make_context(words[0], words[1:])
    while hasattr(command, "list_commands"):
        words = [*ctx._protected_args, *ctx.args]
        _, command, rest = command.resolve_command(ctx, words)
        ctx = command.make_context(words[0], rest, parent=ctx)


def test_a_wrong_example_would_be_noticed() -> None:
    with pytest.raises(Exception, match="--nonsense"):
        _parse(["config", "check", "c.json", "--nonsense"])


def test_the_help_is_the_same_in_a_pipe_and_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    piped = dscore("run", "-h").output
    monkeypatch.setattr("ds_command_kit.show._is_terminal", lambda: True)
    assert dscore("run", "--help").output == piped


def test_options_of_run_stand_in_panels() -> None:
    text = helps()["run"]
    titles = [line for line in text.splitlines() if line.endswith(":") and line[0] != " "]
    order = ["Processes:", "Hosts:", "Elastic:", "Output:", "DeepSpeed:", "Exit codes:"]
    assert [title for title in titles if title in order] == order


def test_help_is_a_word_too() -> None:
    assert dscore("help").output == dscore("--help").output == dscore("-h").output
    assert dscore("help", "config", "check").output == dscore("config", "check", "-h").output
    assert dscore("plugins", "-h").output == dscore("plugins", "--help").output


@pytest.mark.parametrize("group", ["config", "plugins"])
def test_groups_do_not_offer_completion(group: str) -> None:
    assert "completion" not in dscore(group, "--help").output
    assert "--install-completion" in dscore("--help").output


def test_no_group_of_another_package_offers_completion() -> None:
    assert [name for name, text in helps().items() if name and "-completion" in text] == []


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["rn"], "Did you mean 'run'?"),
        (["doctr"], "Did you mean 'doctor'?"),
        (["config", "chek"], "Did you mean 'check'?"),
        (["foo"], "`dscore --help` lists the commands."),
        (["config", "foo"], "`dscore config --help` lists the commands."),
    ],
)
def test_a_misspelt_command_is_told_the_nearest(words: list[str], meant: str) -> None:
    done = dscore(*words)
    assert done.exit_code == 2
    assert f"No such command {words[-1]!r}. {meant}" in " ".join(done.stderr.split())


def test_a_command_that_a_group_has_is_listed_once() -> None:
    pytest.importorskip("ds_checkpoint_deepspeed")
    names = [line.split()[0] for line in dscore("--help").output.splitlines() if line.split()]
    assert "import" not in names and "import" in dscore("checkpoint", "--help").output
    assert "SOURCE" in dscore("import", "--help").output  # it still runs


def test_processes_are_world_everywhere() -> None:
    """``--world`` is the number of processes in every command that has one."""
    for name, ctx in commands().items():
        own = options(ctx)
        if {"--nproc", "--ranks"} & set(own):
            assert "--world" in own, name


def test_the_console_script_prints_help_in_a_pipe_of_any_encoding() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ds_cli", "run", "-h"],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin", "HOME": "/nonexistent"},
        check=False,
    )
    assert done.returncode == 0 and done.stdout.startswith(b"Usage: dscore run")


def test_errors_are_of_our_kinds() -> None:
    with pytest.raises(DSError, match=r"No such command 'nonsense'"):
        find_command("nonsense")
