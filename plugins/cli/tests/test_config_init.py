"""``dscore config init``: a config that the planner recommends and ``config check`` accepts."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import dscore

for _package in ("ds_plan", "ds_zero"):
    pytest.importorskip(_package)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.fast_cases(
    "--for 100M --gpus 1 --device-memory 80GB --precision fp32-None",
    "--for 70B --gpus 8 --device-memory 24GB --precision fp16-zero2",
)
@pytest.mark.parametrize(
    ("words", "zero"),
    [
        ("--for 100M --gpus 1 --device-memory 80GB --precision fp32", None),
        ("--for 7B --gpus 8 --device-memory 80GB", {"stage": 2}),
        (
            "--for 70B --gpus 8 --device-memory 24GB --precision fp16",
            {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            },
        ),
    ],
)
def test_what_is_written_is_accepted(words: str, zero: object) -> None:
    done = dscore("config", "init", "new.json", "--lr", "3e-4", *words.split())
    assert done.exit_code == 0, done.output
    config = json.loads(Path("new.json").read_text())
    assert config.get("zero_optimization") == zero
    assert config["optimizer"]["params"] == {"lr": 3e-4, "weight_decay": 0.01}
    given = [line.partition(": ")[0].strip() for line in done.output.splitlines()[1:-1]]
    assert {*config} <= {*given}
    gpus = words.split()[3]
    assert done.output.splitlines()[-1] == f"next: dscore config check new.json --world {gpus}"
    checked = dscore("config", "check", "new.json", "--world", gpus)
    assert checked.exit_code == 0, checked.output


def test_a_disk_is_used_where_one_is_needed_and_given(tmp_path: Path) -> None:
    words = ["--for", "7B", "--gpus", "1", "--device-memory", "30GB", "--host-memory", "20GB"]
    done = dscore("config", "init", *words)
    assert done.exit_code == 2
    assert "give --disk FOLDER" in done.output
    assert not Path("ds_config.json").exists()
    done = dscore("config", "init", *words, "--disk", str(tmp_path))
    assert done.exit_code == 0, done.output
    zero = json.loads(Path("ds_config.json").read_text())["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": str(tmp_path)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "there is no terminal to ask on"),
        ("--for 7B", "--for needs --gpus and --device-memory"),
        ("--for 7B --gpus 8 --device-memory 80", "--device-memory is '80'; write a number with"),
        ("--for 7B --gpus 8 --device-memory 8GB --host-memory 1", "--host-memory is '1'; write"),
        ("--for lots --gpus 8 --device-memory 80GB", "--for is 'lots'; write a number with a unit"),
        ("nowhere/c.json --for 7B --gpus 8 --device-memory 80GB", "there is no folder"),
    ],
)
def test_it_says_what_is_lacking_and_writes_nothing(tmp_path: Path, words: str, said: str) -> None:
    done = dscore("config", "init", *words.split())
    assert (done.exit_code, said in done.output) == (2, True), done.output
    assert [*tmp_path.iterdir()] == []


def test_that_nothing_fits_is_an_answer_and_no_wrong_usage(tmp_path: Path) -> None:
    done = dscore("config", "init", "--for", "70B", "--gpus", "1", "--device-memory", "1GB")
    assert (done.exit_code, "nothing fits: " in done.output) == (1, True), done.output
    assert "give more devices, more memory or a smaller model" in done.output
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_nothing_is_overwritten_without_force() -> None:
    file = Path("ds_config.json")
    file.write_text("mine")
    words = ["--for", "100M", "--gpus", "1", "--device-memory", "80GB"]
    done = dscore("config", "init", *words)
    assert (done.exit_code, file.read_text()) == (2, "mine")
    assert "--force" in done.output
    assert dscore("config", "init", "--force", *words).exit_code == 0
    assert json.loads(file.read_text())["bf16"] == {"enabled": True}


def test_a_terminal_is_asked(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, b"100M\n2\n16GB\n4\n\n")
    done = subprocess.run(
        [sys.executable, "-m", "ds_cli", "config", "init"],
        stdin=theirs,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    os.close(theirs)
    os.close(ours)
    assert done.returncode == 0, done.stderr
    config = json.loads(Path("ds_config.json").read_text())
    assert config["train_micro_batch_size_per_gpu"] == 4
    assert config["optimizer"]["params"]["lr"] == 1e-4
    assert "--world 2" in done.stdout
