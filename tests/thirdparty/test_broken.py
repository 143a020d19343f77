"""A broken third party takes nothing down, is shown with its reason, and is fatal only when it is
asked for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from building import build_wheels, pip
from ds_testing.processes import clean_environment, run

HERE = Path(__file__).parent
PLAIN = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
# entry point -> what must be said about it
REASONS = {
    "broken_import": ["a_library_nobody_has", "broken_ds.cannot_import"],
    "broken_signature": ["colour", "ds_step_end", "broken_ds.wrong_signature"],
    "broken_hook": ["ds_step_ends", "did you mean 'ds_step_end'", "broken_ds.unknown_hook"],
    "broken_gone": ["No module named 'broken_ds.not_there'"],
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the broken wheel was installed."""
    place = tmp_path_factory.mktemp("broken")
    (wheel,) = build_wheels([HERE / "broken"], place / "wheels")
    pip("install", "--no-deps", "--no-compile", "-q", "--target", str(place / "site"), str(wheel))
    return place / "site"


def run_script(site: Path, folder: Path, settings: dict[str, Any], status: int = 0) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(settings))
    env = clean_environment(PYTHONPATH=str(site))
    output: str = run(
        [sys.executable, str(HERE / "train.py"), str(file)], cwd=folder, env=env, status=status
    )
    return output


def compose(site: Path, settings: dict[str, Any], status: int = 0) -> str:
    """Check a config with the broken distribution installed; prints the owner of csv_monitor when
    there is one.
    """
    code = """
import json, sys, ds_core
chosen = ds_core.compose(json.loads(sys.argv[1]))
print(chosen.plugins.section("csv_monitor").dist if "csv_monitor" in chosen.config.sections else "fine")
"""
    env = clean_environment(PYTHONPATH=str(site))
    output: str = run([sys.executable, "-c", code, json.dumps(settings)], env=env, status=status)
    return output


@pytest.mark.slow
def test_training_that_does_not_name_it_goes_on(site: Path, tmp_path: Path) -> None:
    output = run_script(site, tmp_path, PLAIN)
    seen = json.loads(output.splitlines()[-1])
    assert (seen["steps"], seen["optimizer"]) == (3, "AdamW")


def test_every_broken_entry_is_quarantined_with_its_reason(site: Path) -> None:
    code = """
import json
from ds_core.plugins import Plugins
print(json.dumps([(r.found.name, r.state.value, r.why) for r in Plugins().probe_all() if r.found.dist == "broken-ds"]))
"""
    env = clean_environment(PYTHONPATH=str(site))
    rows = json.loads(run([sys.executable, "-c", code], env=env))
    states = {name: (state, why) for name, state, why in rows}
    for name, words in (REASONS | {"broken_backend": ["a_library_nobody_has"]}).items():
        state, why = states[name]
        assert state == "quarantined"
        assert [w for w in [*words, "broken-ds 0.0.1"] if w not in why] == [], why


@pytest.mark.fast_cases("plugins")
@pytest.mark.parametrize("command", ["plugins", "doctor"])
def test_the_command_line_shows_it_and_why(site: Path, command: str) -> None:
    env = clean_environment(PYTHONPATH=str(site))
    dscore = Path(sys.executable).with_name("dscore")
    output = run([str(dscore), command], env=env, status=-1 if command == "doctor" else 0)
    for name in REASONS:
        assert name in output
    assert "quarantined" in output
    assert "a_library_nobody_has" in output


@pytest.mark.fast_cases("broken_hook", "broken_gone")
@pytest.mark.parametrize("name", sorted(REASONS))
def test_naming_it_is_fatal_with_distribution_module_and_cause(site: Path, name: str) -> None:
    output = compose(site, PLAIN | {name: {}}, status=-1)
    message = output[output.rindex("PluginError") :]
    assert [w for w in [*REASONS[name], repr(name), "broken-ds 0.0.1"] if w not in message] == [], (
        message
    )


def test_a_section_without_a_model_is_fatal_when_named(site: Path) -> None:
    output = compose(site, PLAIN | {"broken_silent": {}}, status=-1)
    message = output[output.rindex("PluginError") :]
    assert [
        w for w in ("broken_silent", "broken-ds 0.0.1", "ds_config") if w not in message
    ] == [], message


def test_two_claims_on_one_section_name_both_and_prefer_resolves(site: Path) -> None:
    named = PLAIN | {"csv_monitor": {"enabled": False}}
    output = compose(site, named, status=-1)
    message = output[output.rindex("PluginError") :]
    words = ("csv_monitor", "broken-ds 0.0.1", "dscore-monitor-csv", '"prefer": {"csv_monitor"')
    assert [w for w in words if w not in message] == [], message
    for owner in ("dscore-monitor-csv", "broken-ds"):
        assert compose(site, named | {"plugins": {"prefer": {"csv_monitor": owner}}}).split() == [
            owner
        ]
    assert compose(site, named | {"plugins": {"disable": ["broken-ds"]}}).split() == [
        "dscore-monitor-csv"
    ]


def test_the_claim_does_not_hurt_who_does_not_name_the_section(site: Path) -> None:
    assert compose(site, PLAIN).split() == ["fine"]
