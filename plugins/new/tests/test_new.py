"""``dscore new plugin``: what it writes, what it refuses, and that a new plugin passes its own
tests.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from building import write_metadata
from ds_new.kinds import KINDS
from ds_new.naming import names_of
from ds_new.rendering import TEMPLATES, modules, render
from ds_testing.processes import clean_environment, run

from ds_core.plugins.discovery import HOOKS

NAMES = ("ab", "a-name-as-long-as-they-come")
"""What is written must be formatted whatever the length of the name."""


def dscore(*arguments: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    from ds_command_kit.app import make_app

    with pytest.raises(SystemExit) as ended:
        make_app()(["new", "plugin", *arguments])
    said = capfd.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def written(folder: Path, kind: str, name: str) -> Path:
    for path, text in render(kind, names_of(name)).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def test_every_kind_has_its_templates() -> None:
    assert sorted(KINDS) == sorted({folder.name for folder in TEMPLATES.iterdir()} - {"common"})
    for kind, about in KINDS.items():
        assert "test.py" in modules(kind)
        declaration = (TEMPLATES / kind / "plugin.py.jinja").read_text()
        assert (
            set(re.findall(r"def (ds_\w+)", declaration)) - {"ds_config"}
            <= set(about.hooks)
            <= set(HOOKS)
        ), kind
        assert ("def ds_config()" in declaration) is about.section, kind


def test_what_is_written_is_formatted(tmp_path: Path) -> None:
    for kind in KINDS:
        for name in NAMES:
            written(tmp_path / name / kind, kind, name)
    ruff = [sys.executable, "-m", "ruff"]
    run([*ruff, "check", "--no-cache", "."], cwd=tmp_path)
    run([*ruff, "format", "--check", "--no-cache", "."], cwd=tmp_path)


def test_the_declarations_load(tmp_path: Path) -> None:
    """All at once in one process, which loads no torch."""
    for kind in KINDS:
        written(tmp_path, kind, f"kind-{kind}")
    code = """
import sys
from ds_core.plugins import Plugins
from ds_core.plugins.discovery import PluginState
from ds_core.plugins.registry import PluginSettings
plugins = Plugins(PluginSettings(load=sys.argv[1:]), found=())
wrong = [r.why for r in plugins.examine() if r.state is not PluginState.LOADED]
assert not wrong and "torch" not in sys.modules, wrong
"""
    packages = {kind: f"kind_{kind.replace('-', '_')}" for kind in KINDS}
    load = [
        f"{p}={p}.plugin" if KINDS[kind].section else f"{p}.plugin" for kind, p in packages.items()
    ]
    run([sys.executable, "-c", code, *load], env=clean_environment(PYTHONPATH=str(tmp_path)))


@pytest.mark.slow
def test_its_tests_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said, _ = dscore("my-events", "--kind", "monitor", capfd=capfd)
    assert code == 0 and "-e my-events\n" in said
    folder = tmp_path / "my-events"
    write_metadata(
        folder, "my-events", entry_points={"ds_core.plugins": {"my_events": "my_events.plugin"}}
    )
    env = clean_environment(PYTHONPATH=str(folder))
    run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=folder,
        env=env,
        timeout=300,
    )
    run([sys.executable, "example/train.py"], cwd=folder, env=env)
    assert "Train/Samples/train_loss" in (folder / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("2fast", "'fast' would do"),
        ("a--b", "'a-b' would do"),
        ("../up", "'up' would do"),
        ("-", "is no name"),
        ("import", "'import' is a word of Python"),
        ("json", "Python's standard library"),
        ("torch", "a package 'torch' can be imported"),
        ("fp16", "a key of the core's config"),
        ("dscore-zero", "dscore-zero 0.1.0 is installed"),
        ("Zero.Optimization", "the plugin 'zero_optimization'"),
        ("nebula", "a section of ds_core's documents"),
    ],
)
def test_a_name_that_cannot_be_used(
    name: str, why: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    code, _, error = dscore("--kind", "monitor", "--folder", str(folder), "--", name, capfd=capfd)
    assert code == 2 and why in error and not folder.exists()


@pytest.mark.parametrize(
    ("name", "kind", "whose"),
    [
        ("adam", "optimizer", "dscore-optimizers"),
        ("one-cycle", "scheduler", "ds-schedulers"),
        ("slurm", "launcher", "dscore-cli"),
        ("z3", "compile-pass", "dscore-zero"),
    ],
)
def test_what_is_chosen_by_name_needs_a_free_one(
    name: str, kind: str, whose: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    code, _, error = dscore(name, "--kind", kind, "--folder", str(folder), capfd=capfd)
    assert code == 2 and f"'my-{name}'" in error and not folder.exists()
    assert re.search(rf"the {kind} '.*' is dscore-", error), (error, whose)
    code, _, error = dscore(f"my-{name}", "--kind", kind, "--folder", str(folder), capfd=capfd)
    assert code == 0, error


def test_a_kind_that_there_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    code, _, error = dscore("my-x", "--kind", "monitors", capfd=capfd)
    assert code == 2 and "did you mean 'monitor'?" in error
    code, _, error = dscore("my-x", capfd=capfd)
    assert code == 2 and "give a name and a --kind" in error
    code, said, _ = dscore(capfd=capfd)
    assert code == 0 and said.startswith("give a name and a --kind; the kinds are:")
    code, _, named = dscore("--kind", "monitor", capfd=capfd)
    assert code == 2 and "dscore new plugin my-monitor --kind monitor" in named
    assert all(
        re.search(rf"^  {kind} +{re.escape(about.meaning)}$", error, re.MULTILINE)
        for kind, about in KINDS.items()
    )


def test_nothing_is_overwritten(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("precious")
    code, _, error = dscore(
        "my-x", "--kind", "monitor", "--folder", str(tmp_path / "mine"), capfd=capfd
    )
    assert code == 2 and "nothing is overwritten" in error
    assert (tmp_path / "mine").read_text() == "precious"
