"""Commands and launchers of plugins."""

from __future__ import annotations

import shlex
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_runs import dscore
from ds_cli.plugin import ds_launchers
from ds_command_kit.launch import LaunchRequest

from ds_core.entries import CommandEntry, LauncherEntry


def test_a_plugins_command_is_resolved_when_it_is_run(install: Any, monkeypatch: Any) -> None:
    group = typer.Typer()
    group.command("one")(lambda: typer.echo("the first"))
    group.command("two")(lambda: typer.echo("the second"))

    def greet(name: str, loud: bool = False) -> None:
        """Its own help."""
        typer.echo(f"hello {name}" + "!" * loud)

    commands = {
        "greet": CommandEntry("made_impl:greet", "Greets."),
        "many": CommandEntry("made_impl:group", "Has parts."),
        "lost": CommandEntry("no_such_module_lost:x", "Cannot be loaded."),
    }
    install("greeter", ds_commands=lambda: commands)
    install("rotten", "ds-rot", ds_commands=lambda: 1 / 0)

    output = dscore("--help").output  # made_impl does not exist yet
    for text in ("greet ", "Greets.", "Has parts.", "Cannot be loaded.", "doctor"):
        assert text in output

    impl = types.ModuleType("made_impl")
    vars(impl).update(greet=greet, group=group)
    monkeypatch.setitem(sys.modules, "made_impl", impl)
    assert dscore("greet", "you", "--loud").output == "hello you!\n"
    assert dscore("many", "two").output == "the second\n"
    assert dscore("greet").exit_code == 2
    done = dscore("lost")
    assert (done.exit_code, done.exception.__class__) == (1, SystemExit)
    assert (
        "plugin 'greeter' (ds-x 1.0, module made_greeter_ds_x) cannot serve the command 'lost'"
        in done.stderr
    )
    assert "no_such_module_lost" in done.stderr
    assert dscore("grete").exit_code == 2


def test_a_plugin_adds_to_a_group(install: Any, monkeypatch: Any) -> None:
    impl = types.ModuleType("made_extra")
    vars(impl).update(extra=lambda: typer.echo("more"), check=lambda: typer.echo("never"))
    monkeypatch.setitem(sys.modules, "made_extra", impl)
    offered = {
        f"config {name}": CommandEntry(f"made_extra:{name}", "Added.")
        for name in ("extra", "check")
    }
    install("adds", ds_commands=lambda: offered)
    assert dscore("config", "extra").output == "more\n"
    assert "Added." in dscore("config", "--help").output
    assert "config extra" not in dscore("--help").output
    assert dscore("config", "check").exit_code == 2  # the group's own comes first, and wants a file
    assert "No such command 'exta'" in dscore("config", "exta").stderr


def test_two_plugins_with_one_command_are_named_and_the_rest_works(install: Any) -> None:
    for dist in ("ds-one", "ds-two"):
        install(
            "same",
            dist,
            ds_commands=lambda: {"same": CommandEntry("a:b", "x"), "plugins": CommandEntry("a:b")},
        )
    done = dscore("same")
    assert done.exit_code == 1
    assert (
        done.stderr
        == "dscore: the command 'same' is offered by ds-one 1.0 and ds-two 1.0; uninstall one of "
        "them\n"
    )
    assert "offered by ds-one 1.0 and ds-two 1.0" in " ".join(dscore("--help").output.split())
    assert dscore("plugins").exit_code == 0  # the core's own command stays the core's


def test_a_launcher_comes_from_a_plugin_by_name(
    install: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    asked: list[LaunchRequest] = []
    impl = types.ModuleType("made_launch")
    vars(impl).update(
        start=lambda request: asked.append(request) or 42, wrong=lambda request: "fine", data=3
    )
    monkeypatch.setitem(sys.modules, "made_launch", impl)
    entries = {
        name.title(): LauncherEntry(f"made_launch:{name}") for name in ("start", "wrong", "data")
    }
    install("far", "ds-far", ds_launchers=lambda: entries)
    install("cli", "dscore-cli", ds_launchers=ds_launchers)
    script = tmp_path / "s.py"
    script.write_text("")
    words = shlex.split("--nproc 3 --max-restarts 2 --nnodes 1:4 --rdzv-endpoint h:1 --rdzv-id me")
    done = dscore(
        "run", "--launcher", "start", *words, "--grace", "1.5", str(script), "--launcher", "x"
    )
    assert done.exit_code == 42
    assert asked == [
        LaunchRequest(
            str(script),
            ("--launcher", "x"),
            nproc=3,
            max_restarts=2,
            max_nodes=4,
            rdzv_endpoint="h:1",
            rdzv_id="me",
            grace=1.5,
        )
    ]
    assert dscore("run", "--launcher", "start", "--world", "6", "-m", "a.b").exit_code == 2
    words = ["--launcher", "start", "--world", "6", "--nnodes", "2"]
    assert dscore("run", *words, str(script)).exit_code == 42
    assert asked.pop().nproc == 3
    assert dscore("run", "--launcher", "START", "-m", "a.b").exit_code == 42
    assert (asked[1].is_module, asked[1].script, asked[1].nproc) == (True, "a.b", None)
    done = dscore("run", "--launcher", "wrong", str(script))
    assert (done.exit_code, "launcher 'wrong' of ds-far returned 'fine'" in done.stderr) == (
        1,
        True,
    )
    assert "is not a function" in dscore("run", "--launcher", "data", str(script)).stderr
    done = dscore("run", "--launcher", "strat", str(script))
    assert (
        done.exit_code,
        "did you mean 'start'? Installed: data, local, start, wrong" in done.stderr,
    ) == (2, True)
    done = dscore("run", "--launcher", "foo", str(script))
    assert "no launcher is called 'foo'. Installed: data, local" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope.py"], "no such script: 'nope.py'"),
        (["nope"], "to run a module use --module"),
        (["."], "is a directory, not a script"),
        (["c.json"], "did you mean: dscore run train.py --deepspeed_config c.json"),
        (["c.json", "s.py"], "did you mean: dscore run s.py --deepspeed_config c.json"),
        (["--world", "2", "--nproc", "2", "s.py"], "give one of them"),
        (
            ["--world", "3", "--nnodes", "2", "--rdzv-endpoint", "h:1", "s.py"],
            "--world 3 is not a multiple of 2, the hosts",
        ),
        (
            ["--world", "2", "--nnodes", "1:2", "--rdzv-endpoint", "h:1", "s.py"],
            "the run is elastic; give --nproc",
        ),
        (["--world", "2", "-H", "hosts", "s.py"], "is 2 on each host, but far has 1 slots"),
        (["--nproc", "0", "s.py"], "--nproc '0' must be a whole number > 0 or 'auto'"),
        (["--nproc", "two", "s.py"], "--nproc 'two'"),
        (["--nnodes", "3:2", "s.py"], "--nnodes '3:2' must be a number of hosts > 0"),
        (["--nnodes", "2", "s.py"], "needs a place to meet"),
        (["--nnodes", "2", "--master-addr", "h", "s.py"], "needs a place to meet"),
        (
            ["--nnodes", "1:2", "--master-addr", "h", "--node-rank", "0", "s.py"],
            "is elastic and needs --hostfile FILE or",
        ),
        (["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "h:1", "s.py"], "use 0 to 1"),
        (["--rdzv-endpoint", "h:1", "--master-port", "3", "s.py"], "two ways to meet"),
        (["--master-addr", "h", "s.py"], "needs --master-port too"),
        (["--max-restarts", "-1", "s.py"], "Invalid value for '--max-restarts'"),
        (["--nonsense", "s.py"], "No such option: --nonsense"),
        ([], "Missing argument 'SCRIPT'"),
    ],
)
def test_what_cannot_be_run_is_said_with_exit_code_2(
    tmp_path: Path, monkeypatch: Any, words: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.py").write_text("raise SystemExit('must not run')")
    (tmp_path / "c.json").write_text("{}")
    (tmp_path / "hosts").write_text("far slots=1\n")
    done = dscore("run", *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "must not run" not in done.output
