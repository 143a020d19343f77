"""``dscore plugins``: kinds, states, reasons; and tables on a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli_runs import dscore, missing
from pydantic import Field

from ds_core.config import Section
from ds_core.entries import OptimizerEntry, SchedulerEntry
from ds_core.plugins import SECTIONS
from ds_core.plugins import registry as P


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
    assert lines[0].split() == ["package", "state", "offers"]
    # What is wrong stands first.
    assert lines[1].split()[:3] == ["ds-bad", "0.1", "quarantined"]
    text = " ".join(done.output.split())
    assert "ds-x 1.0 loaded section zed; monitor; mesh axis" in text
    assert "ds-many 1.0 loaded optimizer a; scheduler b" in text
    why = (
        "plugin 'bad' (ds-bad 0.1, module no_such_module_bad) failed to import: "
        "ModuleNotFoundError: No module named"
    )
    assert why in text
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
            "\n  hooks: ds_config, ds_step_end\n" in said
            and "\n    zed.depth: a whole number, default 1\n        How deep.\n" in said
        )
    (row,) = json.loads(dscore("plugins", "zed", "--json").output)
    depth = {"type": "a whole number", "default": "1", "description": "How deep."}
    assert row["keys"] == {"depth": depth} and row["offers"] == {
        "section": ["zed"],
        "observer": [],
    }
    said = dscore("plugins", "bad").output
    assert "No module named 'no_such_module_bad'" in said and "file: not found" in said
    done = dscore("plugins", "zet")
    assert done.exit_code == 2 and "did you mean 'zed'?" in done.output
    # Part of a name that is not spelt like it.
    assert "did you mean 'ds-zed' or 'zed'?" in dscore("plugins", "z").output
    assert (
        "served by dscore-zero, which is not installed"
        in dscore("plugins", "zero_optimization").output
    )


def test_every_hook_has_a_word_in_the_list() -> None:
    from ds_cli.plugins.command import KINDS, _kind

    from ds_core.plugins.discovery import HOOKS, OBSERVERS, offers

    named = set(HOOKS) - {"ds_config"} - set(OBSERVERS)
    # What a kit's hook offers is called by the hook's name.
    assert set(KINDS) - {"ds_metrics"} == named - (set(offers()) - set(KINDS))
    assert _kind("ds_state_stores", offered=True) == "state store"


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
    text = " ".join(" ".join(lines).split())
    if command == "plugins":
        assert text.split("loaded")[0].count("quarantined") == 1  # before all others
    else:
        assert lines[0].startswith("fault") and "a_plugin_of_an_uncommonly_long_name" in lines[0]
    assert "ModuleNotFoundError: No module named 'no_such_module_bad'" in text


def test_a_distribution_is_one_row_however_many_plugins_it_has(install: Any) -> None:
    install("one", "ds-both", ds_optimizers=lambda: {"a": OptimizerEntry("m:a")})
    install("two", "ds-both", ds_optimizers=lambda: {"b": OptimizerEntry("m:b")})
    lines = dscore("plugins").output.splitlines()
    assert [line.split() for line in lines if line.startswith("ds-both")] == [
        ["ds-both", "1.0", "loaded", "optimizer", "a,", "b"]
    ]


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
