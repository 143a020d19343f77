"""One rule for every command: 2 is wrong usage, 1 a negative answer, 0 fine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from all_commands import contexts
from cli_runs import dscore

GONE = {
    "config check": ["gone.json"],
    "config migrate": ["gone.json"],
    "config explain": ["no_such_key_at_all"],
    "checkpoint inspect": ["gone"],
    "checkpoint verify": ["gone"],
    "checkpoint export": ["gone", "out"],
    "checkpoint export-deepspeed": ["gone", "out"],
    "checkpoint import": ["gone", "out"],
    "checkpoint convert": ["gone", "out"],
    "checkpoint diff": ["gone", "gone"],
    "checkpoint prune": ["gone", "--keep", "1"],
    "curriculum draw": ["gone.json"],
    "doctor": ["--report", "r.md", "--config", "gone.json"],
    "io bench": ["gone"],
    "ops build": ["no-such-package"],
    "ops list": ["--device", "nodev"],
    "ops test": ["--device", "nodev"],
    "plan": ["--world", "2", "--model", "gone.json"],
    "plugins show": ["no-such-plugin"],
    "plugins upgrade": ["gone"],
    "plugins grade": ["no_such_module_here"],
    "report": ["gone"],
    "run": ["gone.py"],
    "serve": ["gone"],
    "top": ["gone"],
    "trace": ["gone"],
    "tune": ["gone.py"],
    "verify": ["gone.py"],
}
"""Words that name something that is not there."""
WITHOUT = {
    "config init",
    "config schema",
    "explain",
    "new plugin",
    "ops bench",
    "pipeline draw",
    "curriculum analyze",
}
"""Commands that name nothing of the kind."""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", GONE)
def test_what_is_not_there_is_wrong_usage(name: str, tmp_path: Path) -> None:
    if name not in contexts():
        pytest.skip(f"the package of `dscore {name}` is not installed")
    done = dscore(*name.split(), *GONE[name])
    said = done.stdout + done.stderr
    assert done.exit_code == 2, said
    named = next(word for word in GONE[name] if "gone" in word or "no" in word)
    assert named in said and "Errno" not in said and "Traceback" not in said
    assert list(tmp_path.iterdir()) == []  # nothing was made


def test_every_command_is_covered() -> None:
    found = {n for n, ctx in contexts().items() if not hasattr(ctx.command, "list_commands")}
    assert found <= GONE.keys() | WITHOUT


@pytest.mark.parametrize("name", sorted({*GONE, *WITHOUT}))
def test_an_unknown_option_is_wrong_usage(name: str) -> None:
    if name not in contexts():
        pytest.skip(f"the package of `dscore {name}` is not installed")
    done = dscore(*name.split(), "--no-such-option-at-all")
    assert done.exit_code == 2 and "--no-such-option-at-all" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["config", "check", "good.json"], 0),
        (["config", "check", "bad.json"], 1),
        (["plan", "--world", "2", "--params", "1M", "--device-memory", "1GB"], 0),
        (["plan", "--world", "2", "--params", "7B", "--device-memory", "1MB"], 1),
        (["pipeline", "draw", "--stages", "2"], 0),
        (["new", "plugin"], 0),
        (["config", "migrate", "good.json"], 0),
        (["config", "migrate", "amp.json"], 1),
        (["io", "bench", "/proc/no-such-folder"], 2),
    ],
)
def test_answers(words: list[str], code: int) -> None:
    found = contexts()
    if words[0] not in found and " ".join(words[:2]) not in found:
        pytest.skip(f"the package of `dscore {words[0]}` is not installed")
    Path("good.json").write_text('{"train_batch_size": 8}')
    Path("bad.json").write_text('{"train_batch_sizes": 8}')
    Path("amp.json").write_text('{"train_batch_size": 8, "amp": {"enabled": true}}')
    done: Any = dscore(*words)
    assert done.exit_code == code, done.output


def test_a_disk_is_only_measured_in_a_folder_that_is_there(tmp_path: Path) -> None:
    pytest.importorskip("ds_nvme")
    done = dscore("io", "bench", str(tmp_path / "mistyped" / "folder"))
    assert done.exit_code == 2 and "no such folder" in done.stderr
    assert not (tmp_path / "mistyped").exists()
