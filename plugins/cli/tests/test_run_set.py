"""``dscore run --set``: the processes train with the keys, and the launcher says which."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import argparse, json, os, sys
import torch, ds_core
parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config")
args = parser.parse_args()
own = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "eps": 1e-6}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
}
given = {} if args.deepspeed_config else {"config": own}
engine, *_ = ds_core.initialize(args, model=torch.nn.Linear(4, 4), **given)
if os.environ["RANK"] == "0":
    print("config", json.dumps(engine.ctx.config.redacted()))
engine.destroy()
"""


def run(tmp_path: Path, *words: str, arguments: tuple[str, ...] = ()) -> Any:
    """``dscore run`` of the script on one process; (exit code, config of rank 0, stderr)."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "ds_cli", "run", "--nproc", "1", *words, str(script)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("config ")]
    return done.returncode, json.loads(lines[0]) if lines else None, done.stderr


def test_keys_of_the_scripts_config_are_replaced(tmp_path: Path) -> None:
    code, config, said = run(
        tmp_path,
        "--set=zero_optimization.stage=2",
        "--set",
        "optimizer.params.lr=1e-3",
        "--set",
        "train_batch_size=2",
        "--record",
        str(tmp_path / "record"),
    )
    assert code == 0, said
    assert config["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 1000}
    assert config["optimizer"]["params"] == {"lr": 0.001, "eps": 1e-6}
    assert config["train_batch_size"] == 2
    line = "dscore: --set replaces keys of the script's config: zero_optimization.stage = 2"
    assert said.count(line) == 1
    (file,) = (tmp_path / "record").rglob("*.jsonl")
    start = json.loads(file.read_text().splitlines()[0])
    assert start["overrides"] == {
        "zero_optimization.stage": 2,
        "optimizer.params.lr": 0.001,
        "train_batch_size": 2,
    }


@pytest.mark.slow
def test_a_file_of_the_scripts_arguments_is_replaced_in_part_too(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text('{"train_batch_size": 4, "zero_optimization": {"stage": 1}}')
    code, config, said = run(
        tmp_path,
        "-q",
        "--set",
        "zero_optimization.stage=0",
        arguments=("--deepspeed_config", str(file)),
    )
    assert code == 0, said
    assert config["zero_optimization"] == {"stage": 0}
    assert "--set" not in said


def test_what_is_wrong_is_said_before_anything_starts(tmp_path: Path) -> None:
    code, config, said = run(
        tmp_path, "--set", "zero_optimization.stage=5", "--set", "wandb.api_keyy=s3cret"
    )
    assert (code, config) == (2, None)
    assert "zero_optimization.stage: must be one of 0, 1, 2, 3, not 5" in said
    assert "s3cret" not in said


@pytest.mark.slow
def test_what_does_not_go_with_the_scripts_config_ends_the_run(tmp_path: Path) -> None:
    code, config, said = run(tmp_path, "--set", "train_micro_batch_size_per_gpu=3")
    assert (code != 0, config) == (True, None)
    assert "train_batch_size 4 is not train_micro_batch_size_per_gpu 3" in said


@pytest.mark.fast_cases("words0")
@pytest.mark.parametrize("words", [("--show",), ()])
def test_options_of_plugins_keep_it(tmp_path: Path, words: tuple[str, ...]) -> None:
    """With an option of a plugin the words are parsed a second time."""
    code, config, said = run(
        tmp_path, *words, "--set", "train_batch_size=3", "--record", str(tmp_path / "r")
    )
    assert code == 0, said
    assert config is None if words else config["train_batch_size"] == 3
