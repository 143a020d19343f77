"""The commands that answer at once: plugins, config, help, version, plugins' own; and doctor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from ds_cli.plugin import ds_launchers
from ds_command_kit.app import make_app
from ds_command_kit.launch import LaunchRequest
from ds_testing import processes
from pydantic import Field
from typer.testing import CliRunner

from ds_core import plugins as P
from ds_core.config import Section
from ds_core.entries import CommandEntry, LauncherEntry, OptimizerEntry, SchedulerEntry
from ds_core.plugins import BACKENDS, SECTIONS, Found

ROOT = Path(__file__).parents[3]


def dscore(*words: str) -> Any:
    return CliRunner().invoke(make_app(), list(words), prog_name="dscore")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Found]:
    """Make a declaration module of functions and let it be what is installed, beside what was
    before.
    """
    rows: list[Found] = []
    monkeypatch.setattr(P, "discover", lambda: tuple(sorted(rows)))

    def make(name: str, dist: str = "ds-x", group: str = BACKENDS, **members: Any) -> Found:
        module = types.ModuleType(f"made_{name}_{dist.replace('-', '_')}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        rows.append(Found(name, group, module.__name__, dist, "1.0"))
        return rows[-1]

    return make


def missing(name: str = "bad", group: str = BACKENDS) -> Found:
    return Found(name, group, "no_such_module_bad", "ds-bad", "0.1")


# -- cost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        *(
            ["--help"],
            ["--version"],
            ["plugins"],
            ["plugins", "zero_optimization"],
            ["run", "--help"],
            ["run", "no_such_script.py"],
        ),
        *(["config", "schema"], ["config", "explain", "fp16"], ["config", "check"]),
    ],
    ids=" ".join,
)
def test_no_torch_is_loaded(tmp_path: Path, words: list[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"train_batch_size": 4, "csv_monitor": {"enabled": false}}')
    words = [*words, str(file)] if words[-1] == "check" else words
    code = """
import sys
class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "numpy"):
            raise AssertionError(f"{name} is imported")
sys.meta_path.insert(0, Forbid())
from ds_cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=processes.clean_environment(PYTHONPATH=str(ROOT)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if words[-1] == "no_such_script.py":
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"dscore: no such script: 'no_such_script.py' in {str(tmp_path)!r}\n"
    else:
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        assert done.stdout


def test_the_help_names_every_command_and_python_m_works() -> None:
    env = processes.clean_environment(PYTHONPATH=str(ROOT))
    output = processes.run([sys.executable, "-m", "ds_cli", "--help"], env=env)
    for name in ("run", "plugins", "doctor", "config"):
        assert f"\n  {name} " in output
    from ds_core import __version__

    assert dscore("--version").output == f"ds-core {__version__}\n"


# -- plugins ---------------------------------------------------------------------------------------


def test_plugins_shows_kinds_states_and_whole_reasons(install: Any, monkeypatch: Any) -> None:
    install(
        "zed",
        group=SECTIONS,
        ds_config=lambda: Section,
        ds_monitors=lambda ctx: [],
        ds_mesh_axes=lambda config: [],
    )
    install(
        "many",
        "ds-many",
        ds_optimizers=lambda: {"a": OptimizerEntry("m:a")},
        ds_schedulers=lambda: {"b": SchedulerEntry("m:b")},
    )
    found = P.discover()
    monkeypatch.setattr(P, "discover", lambda: (*found, missing()))
    done = dscore("plugins")
    assert done.exit_code == 0
    lines = done.output.splitlines()
    # what is wrong stands first, its reason on the next line
    assert lines[0].startswith("quarantined")
    assert lines[0].split()[1] == "bad"
    rows = {
        line.split()[1]: line + below for line, below in zip(lines, [*lines[1:], ""], strict=True)
    }
    assert "section zed; monitor; mesh axis" in rows["zed"]
    assert "optimizer a; scheduler b" in rows["many"]
    assert "loaded" in rows["many"]
    why = (
        "plugin 'bad' (ds-bad 0.1, module no_such_module_bad) failed to import: "
        "ModuleNotFoundError: No module named"
    )
    assert "quarantined" in rows["bad"]
    assert why in rows["bad"]
    as_json = {row["name"]: row for row in json.loads(dscore("plugins", "--json").output)}
    assert as_json["zed"]["offers"] == {"section": ["zed"], "monitor": [], "mesh axis": []}
    assert as_json["many"]["offers"] == {"optimizer": ["a"], "scheduler": ["b"]}
    assert (as_json["bad"]["state"], as_json["bad"]["distribution"]) == ("quarantined", "ds-bad")
    assert as_json["core"]["version"] == as_json["core"]["version"].strip() != ""


def test_one_plugin_in_detail(install: Any, monkeypatch: Any) -> None:
    class Zed(Section):
        depth: int = Field(1, description="How deep.")

    install("zed", "ds-zed", group=SECTIONS, ds_config=lambda: Zed, ds_step_end=lambda ctx: None)
    found = P.discover()
    monkeypatch.setattr(P, "discover", lambda: (*found, missing()))
    for name in ("zed", "ds-zed"):
        said = dscore("plugins", name).output
        assert said.startswith(
            "zed (ds-zed 1.0): loaded\n  entry point: zed = made_zed_ds_zed (ds_core.plugins)\n"
        )
        assert (
            "\n  hooks: ds_config, ds_step_end\n" in said and "\n    zed.depth: How deep.\n" in said
        )
    (row,) = json.loads(dscore("plugins", "zed", "--json").output)
    assert row["keys"] == {"depth": "How deep."} and row["offers"] == {
        "section": ["zed"],
        "observer": [],
    }
    said = dscore("plugins", "bad").output
    assert "No module named 'no_such_module_bad'" in said and "file: not found" in said
    done = dscore("plugins", "zet")
    assert done.exit_code == 2 and "did you mean 'zed'?" in done.output
    assert (
        "served by ds-zero, which is not installed" in dscore("plugins", "zero_optimization").output
    )


def test_every_hook_has_a_word_in_the_list() -> None:
    from ds_cli.plugins.command import KINDS

    from ds_core.discovery import HOOKS, OBSERVERS

    assert set(KINDS) - {"ds_metrics"} == set(HOOKS) - {"ds_config"} - set(OBSERVERS)


def test_a_table_on_a_terminal_folds_and_loses_nothing(capsys: Any, monkeypatch: Any) -> None:
    from ds_command_kit.show import show_table

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    long = "".join(chr(ord("a") + i % 26) for i in range(100))
    show_table(("name", "why"), [("[bold]x", long)])
    out = capsys.readouterr().out
    assert "[bold]x" in out
    assert len(out.splitlines()) > 4
    cells = [line.replace("[bold]x", "").strip() for line in out.splitlines()]
    assert "".join(cell for cell in cells if cell.isalpha()) == long


@pytest.mark.parametrize("command", ["plugins", "doctor"])
def test_reports_are_readable_at_80_columns(command: str, install: Any, monkeypatch: Any) -> None:
    """On a terminal: no line is longer, no word is cut, and what is wrong stands first."""
    found = missing("a_plugin_of_an_uncommonly_long_name")
    monkeypatch.setattr(P, "discover", lambda: (found,))
    monkeypatch.setattr(
        "ds_command_kit.show.shutil.get_terminal_size", lambda: os.terminal_size((80, 24))
    )
    monkeypatch.setattr("ds_command_kit.show._is_terminal", lambda: True)
    lines = dscore(command).output.splitlines()
    assert max(map(len, lines)) <= 80
    first = "quarantined" if command == "plugins" else "fault"
    assert lines[0].startswith(first) and "a_plugin_of_an_uncommonly_long_name" in lines[0]
    assert "ModuleNotFoundError: No module named 'no_such_module_bad'" in " ".join(
        " ".join(lines).split()
    )


def test_completion_is_offered_and_knows_the_commands(monkeypatch: Any) -> None:
    # Which shell started this test is no matter: it may have been none.
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))
    assert "_DSCORE_COMPLETE=complete_bash" in dscore("--show-completion").output
    assert "--install-completion" in dscore("--help").output
    environment = {
        "_DSCORE_COMPLETE": "complete_bash",
        "COMP_WORDS": "dscore do",
        "COMP_CWORD": "1",
    }
    done = subprocess.run(
        [str(Path(sys.executable).with_name("dscore"))],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["doctor"]


# -- config ----------------------------------------------------------------------------------------


def test_config_check(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "csv_monitor": {"enabled": '
        "false}}"
    )
    done = dscore("config", "check", str(file), "--world", "2")
    assert done.exit_code == 0
    assert (
        "train_batch_size 8 = micro batch 2 x accumulation 2 x 2 data-parallel ranks" in done.output
    )
    assert "csv_monitor: ds-monitor-csv" in done.output
    assert dscore("config", "check", str(file), "--world", "3").exit_code == 1

    file.write_text('{"fp16": {"enabld": true}, "gradient_clippin": 1}')
    done = dscore("config", "check", str(file))
    assert done.exit_code == 1
    assert len(done.output.splitlines()) == 2
    assert "fp16.enabld" in done.output
    assert "did you mean 'gradient_clipping'" in done.output

    file.write_text('{"kernels": {"squared_norm": "warp"}}')
    done = dscore("config", "check", str(file))
    assert (done.exit_code, "no provider 'warp'" in done.output) == (1, True)
    (tmp_path / "made_to_run.py").write_text(
        f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\ndef ds_close():\n    pass\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        for load in ('["made_to_run"]', '{"load": ["own=made_to_run"]}'):
            file.write_text(f'{{"plugins": {load}}}')
            done = dscore("config", "check", str(file))
            assert (
                done.exit_code != 0
                and "give --import" in done.output
                and "made_to_run" in done.output
            )
        assert not (tmp_path / "ran").exists()
        file.write_text('{"train_batch_size": 1, "plugins": ["made_to_run"]}')
        assert (
            dscore("config", "check", "--import", str(file)).exit_code == 0
            and (tmp_path / "ran").exists()
        )
    finally:
        sys.path.remove(str(tmp_path))
    for path in (tmp_path, tmp_path / "none.json"):
        done = dscore("config", "check", str(path))
        assert (done.exit_code, done.output.count("\n")) == (1, 1)


def test_config_schema_and_explain() -> None:
    schema = json.loads(dscore("config", "schema").stdout)
    assert {"train_batch_size", "fp16", "csv_monitor", "tensorboard"} <= set(schema["properties"])
    done = dscore("config", "explain", "csv_monitor.output_path")
    assert done.exit_code == 0
    assert "owner:   ds-monitor-csv" in done.output
    done = dscore("config", "explain", "fp16.los_scale")
    assert (done.exit_code, "did you mean 'fp16.loss_scale'" in done.output) == (1, True)


def test_a_broken_section_is_left_out_of_the_schema_with_a_word(
    install: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(P, "discover", lambda: (missing(group=SECTIONS),))
    done = dscore("config", "schema")
    assert done.exit_code == 0
    assert "bad" not in json.loads(done.stdout)["properties"]
    assert "left out: plugin 'bad'" in done.stderr


# -- doctor ----------------------------------------------------------------------------------------


def test_doctor_finds_a_sound_installation_sound(install: Any) -> None:
    done = dscore("doctor")
    assert done.exit_code == 0, done.output
    assert "nothing is broken" in done.output
    lines = done.output.splitlines()
    for part in ("python", "torch", "accelerator", "g++", "nvcc", "ninja", "/dev/shm"):
        assert any(line.split(maxsplit=1)[-1].startswith(part) for line in lines), part
    rows = json.loads(dscore("doctor", "--json").output)
    assert {row["level"] for row in rows} <= {"ok", "note"}
    assert all(row["fix"] for row in rows if row["level"] != "ok")


def test_doctor_names_faults_with_a_fix(install: Any, monkeypatch: Any) -> None:
    install(
        "one",
        "ds-one",
        ds_commands=lambda: {"same": CommandEntry("a:b"), "run": CommandEntry("a:b")},
    )
    install("two", "ds-two", ds_commands=lambda: {"same": CommandEntry("a:b")})
    install("cross", "ds-three", ds_commands=lambda: 1 / 0)
    install("twice", "ds-one", SECTIONS)
    install("twice", "ds-two", SECTIONS)
    found = P.discover()
    monkeypatch.setattr(P, "discover", lambda: (*found, missing()))
    monkeypatch.setenv("DS_ACCELERATOR", "abacus")
    done = dscore("doctor", "--json")
    assert done.exit_code == 1
    faults = {row["part"]: row for row in json.loads(done.stdout) if row["level"] == "fault"}
    assert "ds-cli and ds-one 1.0" in faults["command run"]["found"]
    assert "ds-one 1.0 and ds-two 1.0" in faults["command same"]["found"]
    assert "ZeroDivisionError" in faults["plugin cross"]["found"]
    assert "quarantined" in faults["plugin bad"]["found"]
    assert "ds-one 1.0 and ds-two 1.0" in faults["section twice"]["found"]
    assert "abacus" in faults["accelerator"]["found"]
    assert [part for part, row in faults.items() if not row["fix"]] == []


def test_doctor_has_nothing_against_its_own_commands() -> None:
    assert [
        row["part"]
        for row in json.loads(dscore("doctor", "--json").stdout)
        if row["part"].startswith("command")
    ] == []


def test_doctor_comes_to_its_end_whatever_fails(install: Any, monkeypatch: Any) -> None:
    from ds_cli.doctor import checks

    def broken(plugins: Any) -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(checks, "_compilers", broken)
    rows = json.loads(dscore("doctor", "--json").stdout)
    assert {
        "part": "compilers",
        "level": "fault",
        "found": "ZeroDivisionError: oops",
    }.items() <= next(row for row in rows if row["part"] == "compilers").items()
    assert rows[-1]["part"] == "loopback"


# -- commands and launchers of plugins -------------------------------------------------------------


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
    install("cli", "ds-cli", ds_launchers=ds_launchers)
    script = tmp_path / "s.py"
    script.write_text("")
    words = [
        "--nproc",
        "3",
        "--max-restarts",
        "2",
        "--nnodes",
        "1:4",
        "--rdzv-endpoint",
        "h:1",
        "--rdzv-id",
        "me",
    ]
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nope.py"], "no such script: 'nope.py'"),
        (["nope"], "to run a module use --module"),
        (["."], "is a directory, not a script"),
        (["--nproc", "0", "s.py"], "--nproc '0' must be a whole number > 0 or 'auto'"),
        (["--nproc", "two", "s.py"], "--nproc 'two'"),
        (["--nnodes", "3:2", "s.py"], "--nnodes '3:2' must be a number of machines > 0"),
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
    done = dscore("run", *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "must not run" not in done.output
