"""The words of ``dscore run`` around a trial."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ds_autotuning.trials.launching import Launch, at, parse_words
from ds_command_kit.show import CommandError
from typer.testing import CliRunner

from ds_core.config import read_config


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text("{}")


@pytest.mark.parametrize(
    ("words", "config"),
    [
        ("train.py --deepspeed_config ds.json", "ds.json"),
        ("train.py --deepspeed --deepspeed_config ds.json", "ds.json"),
        ("train.py --deepspeed ds.json --lr 3", "ds.json"),
        ("train.py --ds_config=ds.json", "ds.json"),
        ("train.py --deepspeed_config later.json", "later.json"),
        ("train.py --deepspeed", ""),
        ("train.py --deepspeed --lr 3", ""),
        ("train.py --config ds.json", ""),
        ("train.py", ""),
    ],
)
def test_the_config_among_the_scripts_arguments(words: str, config: str) -> None:
    assert parse_words(words.split()).config == config


def test_words_are_options_script_and_arguments() -> None:
    launch = parse_words(["--nproc", "2", "--tag", "train.py", "--nproc", "3", "--x"])
    assert (launch.options, launch.script, launch.arguments) == (
        ("--nproc", "2", "--tag"),
        "train.py",
        ("--nproc", "3", "--x"),
    )
    assert launch.words() == ["--nproc", "2", "--tag", "train.py", "--nproc", "3", "--x"]
    assert launch.world == 2
    assert parse_words(["--module", "pkg.train"]).is_module
    assert parse_words(["--no_python", "--", "bash", "-c", "true"]).is_command


def test_keys_of_set_are_in_the_variable_and_not_in_the_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or they would replace the settings of each trial."""
    monkeypatch.setenv("DS_CONFIG_OVERRIDES", "")
    words = ["--set", "fp16.hysteresis=3", "--nproc", "2", "--set=optimizer.type=SGD", "train.py"]
    launch = parse_words([*words, "--set", "x=1"])
    assert launch.words() == ["--nproc", "2", "train.py", "--set", "x=1"]
    found = read_config(os.environ["DS_CONFIG_OVERRIDES"]).raw
    assert found == {"fp16.hysteresis": 3, "optimizer.type": "SGD"}
    with pytest.raises(CommandError, match="fp16.hysteresis: must be"):
        parse_words(["--set", "fp16.hysteresis=x", "train.py"])


@pytest.mark.parametrize(
    ("words", "world"),
    [
        ("train.py", None),
        ("--num_gpus 4 --num_nodes 2 train.py", 8),
        ("--nproc 4 --hostfile hosts train.py", None),
        ("--nproc 4 --hostfile hosts --nnodes 2 train.py", 8),
    ],
)
def test_the_number_of_ranks_as_far_as_the_words_tell_it(words: str, world: int | None) -> None:
    assert parse_words(words.split()).world == world


@pytest.mark.parametrize(
    "words", ["--show train.py", "--autotuning run train.py", "--nnodes 1:2 train.py"]
)
def test_what_a_trial_cannot_be(words: str) -> None:
    with pytest.raises(CommandError):
        parse_words(words.split())


@pytest.mark.parametrize("given", ["--max-restarts 3", "--max_restarts=3"])
def test_a_trial_that_fails_is_not_started_again(given: str) -> None:
    launch = parse_words([*given.split(), "--tag", "train.py", "--max-restarts", "5"])
    assert launch.command() == [
        *(sys.executable, "-m", "ds_cli", "run", "--max-restarts", "0", "--tag"),
        *("train.py", "--max-restarts", "5"),
    ]


def test_flags_that_say_the_same_as_keys_follow_them() -> None:
    launch = Launch((), "train.py", ("--batch", "1", "--acc=1", "-v"))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
    }
    mappings = {
        "train_micro_batch_size_per_gpu": "--batch",
        "gradient_accumulation_steps": "--acc",
        "bf16.enabled": "--bf16",
        "zero_optimization.stage": "--stage",
    }
    assert launch.with_flags(config, mappings).arguments == (
        "--batch",
        "8",
        "--acc=2",
        "-v",
        "--bf16",
        "true",
    )


def test_the_final_command_has_the_config_where_the_script_looks_for_it() -> None:
    launch = parse_words(
        ["--nproc", "2", "train.py", "--deepspeed_config", "ds.json", "--ds_config=ds.json"]
    )
    assert launch.final(Path("/o.json")) == (
        [
            "dscore",
            "run",
            "--nproc",
            "2",
            "train.py",
            "--deepspeed_config",
            "/o.json",
            "--ds_config=/o.json",
        ]
    )
    own = parse_words(["train.py", "--x"])
    assert own.final(Path("/o.json")) == [
        "env",
        "DS_CONFIG_OVERRIDES=/o.json",
        "dscore",
        "run",
        "train.py",
        "--x",
    ]


def test_a_file_as_overrides_is_read(tmp_path: Path) -> None:
    """What the command that is given for scripts with a config of their own relies on."""
    (tmp_path / "o.json").write_text('{"a": 1}')
    assert read_config(str(tmp_path / "o.json")).raw == {"a": 1}


def test_dotted_keys() -> None:
    assert at({"a": {"b": 0}}, "a.b") == 0
    assert at({"a": 1}, "a.b") is None


# -- dscore run --autotuning -----------------------------------------------------------------------


def replaced(get_command: Callable[..., Any], main: Callable[..., int]) -> Callable[..., Any]:
    """``typer.main.get_command``, which gives `main` for the tuner's app."""
    from ds_autotuning.command import app as tuner

    return lambda app: main if app is tuner else get_command(app)


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (
            "--autotuning tune --nproc 2 train.py --autotuning x",
            ["--nproc", "2", "train.py", "--autotuning", "x"],
        ),
        ("--nproc 2 --autotuning=run train.py", ["--then-run", "--nproc", "2", "train.py"]),
    ],
)
def test_autotuning_hands_the_words_to_the_command_tune(
    given: str, passed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_autotuning import command
    from ds_command_kit import app

    seen: list[list[str]] = []

    def main(words: list[str], **_: object) -> int:
        seen.append(words)
        return 7

    monkeypatch.setattr(
        command.typer.main, "get_command", replaced(command.typer.main.get_command, main)
    )
    ended = CliRunner().invoke(app.make_app(), ["run", *given.split()])
    assert ended.exit_code == 7, ended.output
    assert seen == [passed]


def test_tune_says_what_is_missing() -> None:
    from ds_command_kit.app import make_app

    ended = CliRunner().invoke(make_app(), ["tune"])
    assert ended.exit_code == 2
    assert "which script?" in ended.output
    ended = CliRunner().invoke(make_app(), ["tune", "--nproc", "2", "nothing.py"])
    assert ended.exit_code == 2
    assert "no such script" in ended.output
