"""``dscore tune`` from the command line to the results, also when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ds_testing.processes import clean_environment

pytestmark = pytest.mark.slow

SCRIPT = """
import argparse, os, sys, time, torch, ds_core
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed_config")
parser.add_argument("--batch", type=int, default=0)
args = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
data = [(torch.randn(32), torch.randn(1)) for _ in range(512)]
more = {} if args.deepspeed_config else {"config": CONFIG}
engine, _, loader, _ = ds_core.initialize(args=args, model=model, training_data=data, **more)
zero = engine.config.section("zero_optimization")
stage, micro = (zero.stage if zero else 0), engine.train_micro_batch_size_per_gpu()
if args.batch:
    assert args.batch == micro, (args.batch, micro)
if FAULTS and stage == 1:
    raise ValueError("stage 1 is broken")
if FAULTS and stage == 2 and engine.global_rank == 1:
    time.sleep(600)
if FAULTS and stage == 3:
    bytearray(6_000_000_000)
for epoch in range(20):
    for x, y in loader:
        engine.backward(nn.functional.mse_loss(engine(x), y))
        engine.step()
if engine.global_rank == 0:
    print("trained", stage, micro)
"""

BASE: dict[str, Any] = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 0},
    "csv_monitor": {"enabled": True, "output_path": "monitors"},
}
QUICK = {"start_profile_step": 1, "end_profile_step": 2}


def written(
    folder: Path, section: dict[str, Any], faults: bool = False, own: bool = False
) -> list[str]:
    """A script with its config in `folder`; the words that start it."""
    config = {**BASE, "autotuning": {**QUICK, **section}}
    text = SCRIPT.replace("CONFIG", repr(config)).replace("FAULTS", str(faults))
    (folder / "train.py").write_text(text)
    (folder / "ds.json").write_text(json.dumps(config))
    return ["train.py"] if own else ["train.py", "--deepspeed_config", "ds.json"]


def dscore(folder: Path, *words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ds_cli", *words],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        **options,
    )


def results(folder: Path) -> dict[str, Any]:
    return {
        p.parent.name: json.loads(p.read_text())
        for p in sorted((folder / "autotuning_exps").glob("*/result.json"))
    }


def test_a_script_is_tuned_and_run(tmp_path: Path) -> None:
    section = {
        "tuner_type": "gridsearch",
        "tuner_num_trials": 3,
        "arg_mappings": {"train_micro_batch_size_per_gpu": "--batch"},
    }
    words = written(tmp_path, section)
    done = dscore(tmp_path, "run", "--autotuning", "run", "--nproc", "2", *words, "--batch", "4")
    assert done.returncode == 0, done.stderr
    found = results(tmp_path)
    assert [name[:3] for name in found] == ["001", "002", "003", "pro", "pro"]
    assert "001_z0_mbs4" in found  # the config as given
    assert all(r["status"] == "done" and r["throughput"] > 0 for r in found.values()), found
    best = json.loads((tmp_path / "autotuning_results" / "ds_config_optimal.json").read_text())
    assert best["train_batch_size"] == 8  # it is given, so it stays
    assert best["csv_monitor"] == BASE["csv_monitor"]
    assert "autotuning" not in best
    micro = best["train_micro_batch_size_per_gpu"]
    command = (tmp_path / "autotuning_results" / "cmd_optimal.txt").read_text()
    assert "ds_config_optimal.json" in command
    assert f"--batch {micro}" in command
    assert f"trained {best['zero_optimization']['stage']} {micro}" in done.stdout
    assert "samples/s" in (tmp_path / "autotuning_results" / "summary.txt").read_text()
    assert (tmp_path / "autotuning_results" / "index.html").exists()


def test_one_that_hangs_crashes_or_eats_memory_costs_no_more_than_its_limit(tmp_path: Path) -> None:
    section = {
        "tuner_type": "gridsearch",
        "trial_seconds": 60,
        "host_memory_gb": 4,
        "max_train_micro_batch_size_per_gpu": 1,
    }
    words = written(tmp_path, section, faults=True)
    done = dscore(tmp_path, "tune", "--nproc", "2", *words)
    assert done.returncode == 0, done.stderr
    found = {name.partition("_")[2]: r for name, r in results(tmp_path).items()}
    assert found["z0_mbs1"]["status"] == "done"
    assert found["z1_mbs1"]["status"] == "crashed"
    assert "stage 1 is broken" in found["z1_mbs1"]["reason"]
    assert found["z2_mbs1"]["status"] == "timeout"
    assert found["z2_mbs1"]["took"] < 60 + 30
    assert found["z3_mbs1"]["status"] == "out_of_memory"
    best = json.loads((tmp_path / "autotuning_results" / "ds_config_optimal.json").read_text())
    assert best["zero_optimization"]["stage"] == 0


def test_a_script_that_does_not_run_cannot_be_tuned(tmp_path: Path) -> None:
    words = written(tmp_path, {})
    (tmp_path / "train.py").write_text("raise ValueError('no data')")
    done = dscore(tmp_path, "tune", "--nproc", "2", *words)
    assert done.returncode == 1
    assert "ValueError: no data" in done.stderr
    assert "profile_1/log" in done.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_killed_at_any_moment_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """Three times at different moments; each trial that was finished is kept, and the end is the
    same.
    """
    section = {"tuner_type": "random", "tuner_num_trials": 3, "seed": 3}
    words = ["tune", "--nproc", "2", *written(tmp_path, section)]
    kept: dict[str, Any] = {}
    for wanted in ("profile_1", "001_", "002_"):
        tuner = subprocess.Popen(
            [sys.executable, "-m", "ds_cli", *words],
            cwd=tmp_path,
            env=clean_environment(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + 300
        while not any(p.name.startswith(wanted) for p in tmp_path.glob("autotuning_exps/*")):
            assert time.monotonic() < deadline
            assert tuner.poll() is None
            time.sleep(0.1)
        time.sleep(1.0)  # in the middle of it
        os.kill(tuner.pid, signal.SIGKILL)
        tuner.wait()
        kept |= {n: r for n, r in results(tmp_path).items() if r["status"] == "done" and r["took"]}
    done = dscore(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    after = results(tmp_path)
    assert len(after) == 5
    assert kept
    assert {name: after[name] for name in kept} == kept
    again = dscore(tmp_path, *words)  # nothing is left to run
    assert again.returncode == 0
    assert results(tmp_path) == after
    assert again.stdout == done.stdout


def test_a_script_with_a_config_of_its_own(tmp_path: Path) -> None:
    words = written(tmp_path, {}, own=True)
    section = {"tuner_type": "gridsearch", "tuner_num_trials": 2, **QUICK}
    (tmp_path / "tuning.json").write_text(json.dumps({"autotuning": section}))
    env = {**os.environ, "DS_CONFIG_OVERRIDES": str(tmp_path / "tuning.json")}
    keep = ("--set", "optimizer.params.eps=1e-6")
    done = subprocess.run(
        [sys.executable, "-m", "ds_cli", "tune", "--nproc", "2", *keep, *words],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    best = json.loads((tmp_path / "autotuning_results" / "ds_config_optimal.json").read_text())
    assert "optimizer" not in best  # only what differs from the script's own
    assert best["optimizer.params.eps"] == 1e-6
    assert "DS_CONFIG_OVERRIDES=" in done.stdout
    assert "csv_monitor" not in best
    ran = subprocess.run(
        done.stdout.strip().replace("dscore run", f"{sys.executable} -m ds_cli run").split(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert "trained" in ran.stdout, ran.stderr


def test_a_given_number_of_parameters_skips_the_first_run(tmp_path: Path) -> None:
    section = {
        "tuner_type": "gridsearch",
        "model_info": {"num_params": 1_000_000_000},
        "device_memory_gb": 12,  # stage 0 needs 16 bytes per parameter
        "max_train_micro_batch_size_per_gpu": 1,
        "tuner_num_trials": 1,
        "space": {"zero_optimization.stage": [0, 3]},
    }
    words = written(tmp_path, section)
    done = dscore(tmp_path, "tune", "--nproc", "2", *words)
    assert done.returncode == 0, done.stderr
    assert list(results(tmp_path)) == ["001_z3_mbs1"]
    assert "not tried: z0_mbs1  does_not_fit" in done.stderr
