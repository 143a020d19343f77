"""The record of a run: what it holds, that it survives a kill, and that it is never in the way."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ds_report.reading import read_now, read_rank
from ds_report.recorder import Recorder
from ds_report.top.state import State, standing
from ds_testing import ObserverConformance, PluginConformance, run_ranks
from ds_testing.processes import clean_environment, run

import ds_core
from ds_core.accelerator.cpu import CpuAccelerator
from ds_core.errors import ConfigError


class TestPlugin(PluginConformance):
    entry_point = "ds_report.plugin"
    section = "run_record"
    good_config: ClassVar[Any] = {"folder": "runs/a", "seconds": 0.5, "total_steps": 10}
    bad_configs: ClassVar[Any] = [
        {"enabled": 1},
        {"folder": ""},
        {"seconds": 0},
        {"total_steps": 0},
        {"foldr": "a"},
    ]


class TestObserver(ObserverConformance):
    # no record; training must be the same
    config: ClassVar[Any] = {"run_record": {"folder": "/dev/null/no-folder"}}


SECRET = "hunter2hunter2"


def recorded_run(folder: str, steps: int, fail: str = "") -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW"},
        "run_record": {"folder": folder, "seconds": 0.05, "total_steps": 40},
        "plugins": {"prefer": {"my_token": SECRET}},
    }
    engine, *_ = ds_core.initialize(model=model, config=config)
    for step in range(steps):
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 4)).square().sum() * (step + 1))
            engine.step()
    if fail:
        try:
            raise ValueError(f"{fail}: {SECRET}")
        finally:
            engine.destroy()
    engine.destroy()


def test_what_a_record_holds(tmp_path: Path) -> None:
    run_ranks(2, recorded_run, str(tmp_path / "a"), 3)
    ranks = [read_rank(rank, tmp_path / "a" / f"rank{rank}.jsonl") for rank in range(2)]
    for rank, record in enumerate(ranks):
        (start,) = record.starts
        assert (start["rank"], start["world_size"], start["total_steps"]) == (rank, 2, 40)
        assert start["config"]["gradient_accumulation_steps"] == 2
        assert start["versions"]["torch"] == torch.__version__
        columns = record.columns
        assert list(columns.step) == [1, 2, 3]
        assert list(columns.column("samples")) == [8.0, 16.0, 24.0]
        losses = columns.column("loss")
        assert losses[0] > 0 and losses[2] > losses[0]
        assert {
            "lr",
            "grad_norm",
            "skipped",
            "host_ms/forward",
            "host_ms/backward",
            "host_ms/step",
        } <= set(columns.values)
        assert record.memory and record.memory[-1][1] > 1e6
        assert (record.last, record.bad) == ("finished", 0)
    assert standing(ranks, {}).state is State.FINISHED
    assert not any(SECRET.encode() in file.read_bytes() for file in (tmp_path / "a").iterdir())


def test_a_resumed_run_appends_and_replaces_what_it_repeats(tmp_path: Path) -> None:
    for steps in (5, 3):
        run_ranks(1, recorded_run, str(tmp_path), steps)
    record = read_rank(0, tmp_path / "rank0.jsonl")
    assert len(record.starts) == 2
    assert list(record.columns.step) == [1, 2, 3]
    assert record.columns.starts == [0, 0]


def test_a_failure_is_told_without_secrets(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no more data"):
        recorded_run(str(tmp_path), 1, fail="no more data")
    record = read_rank(0, tmp_path / "rank0.jsonl")
    assert (record.last, record.error) == ("failed", "ValueError: no more data: ***")
    assert standing([record], {}).state is State.FAILED


SCRIPT = """
import sys, time, torch
sys.path.insert(0, sys.argv[2])
from test_run_record import Recorder, CpuAccelerator, Path
recorder = Recorder(Path(sys.argv[1]), 0, {"rank": 0}, CpuAccelerator(), seconds=0.02)
for step in range(1, 100_000):
    recorder.phase_begin("forward")
    recorder.step(step, {"loss": torch.tensor(1.0 / step)})
    if step == 100:
        recorder.folder.joinpath("go").touch()
    time.sleep(0.001)
"""


def test_a_killed_run_keeps_what_was_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, env=clean_environment()) as process:
        while not (tmp_path / "go").exists():
            assert process.poll() is None
            time.sleep(0.01)
        assert (
            standing([read_rank(0, tmp_path / "rank0.jsonl")], {0: read_now(tmp_path, 0)}).state
            is State.RUNNING
        )
        process.send_signal(signal.SIGKILL)
    record = read_rank(0, tmp_path / "rank0.jsonl")
    assert list(record.columns.step) == list(range(1, len(record.columns.step) + 1))
    assert list(record.columns.column("loss")) == [
        float(torch.tensor(1.0 / step)) for step in record.columns.step
    ]
    now = read_now(tmp_path, 0)
    assert now["phase"] == "forward"
    died = standing([record], {0: now}, clock=now["time"] + 5)
    assert (died.state, "rank 0 ended without a word" in died.text) == (State.DIED, True)

    with (tmp_path / "rank0.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')  # half a line
    again = Recorder(tmp_path, 0, {"rank": 0}, CpuAccelerator(), seconds=60)
    again.step(7, {"loss": float("nan"), "x": float("inf")})
    again.end("finished")
    record = read_rank(0, tmp_path / "rank0.jsonl")
    assert (record.bad, list(record.columns.step), record.last) == (
        1,
        list(range(1, 8)),
        "finished",
    )
    whole = [
        line for line in (tmp_path / "rank0.jsonl").read_text().splitlines() if line.endswith("}")
    ]
    assert all(json.loads(line, parse_constant=pytest.fail) for line in whole)


LATER = """
import sys
from pathlib import Path

from ds_report.recorder import Recorder

from ds_core.accelerator.cpu import CpuAccelerator

recorder = Recorder(Path(sys.argv[1]), 0, {"rank": 0}, CpuAccelerator(), seconds=60, secrets=frozenset(["s3cr3t"]))
recorder.step(4, {"loss": 1.0})
recorder.end("finished")
"""


@pytest.mark.fast_cases("False")
@pytest.mark.parametrize("launched", [False, True])
def test_a_script_that_fails_after_training_has_failed(tmp_path: Path, launched: bool) -> None:
    script = tmp_path / "train.py"
    script.write_text(LATER + 'raise ValueError("no plot of s3cr3t")\n')
    start = ["-m", "ds_cli", "run", "--nproc", "1"] if launched else []
    command = [sys.executable, *start, str(script), str(tmp_path / "runs")]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 1
    record = read_rank(0, tmp_path / "runs" / "rank0.jsonl")
    assert (record.last, list(record.columns.step), record.bad) == ("failed", [4], 0)
    assert record.error.startswith("ValueError: no plot of ") and "s3cr3t" not in record.error
    assert standing([record], {}).state is State.FAILED


def test_a_script_that_ends_after_training_is_finished(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LATER + "sys.exit(0)\n")
    subprocess.run([sys.executable, str(script), str(tmp_path / "runs")], check=True, timeout=120)
    assert read_rank(0, tmp_path / "runs" / "rank0.jsonl").last == "finished"


def test_two_engines_do_not_write_one_file(tmp_path: Path) -> None:
    one, two = (Recorder(tmp_path, 0, {"rank": 0}, CpuAccelerator(), seconds=60) for _ in range(2))
    assert (one.folder, two.folder) == (tmp_path, tmp_path / "engine2")
    for recorder in (one, two):
        recorder.end("finished")


def test_a_full_disk_ends_the_record_and_not_the_run(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    full_at: Callable[[int], AbstractContextManager[None]],
) -> None:
    recorder = Recorder(tmp_path, 0, {"rank": 0}, CpuAccelerator(), seconds=60)
    size = (tmp_path / "rank0.jsonl").stat().st_size
    with caplog.at_level(logging.WARNING), full_at(size + 50):
        recorder.step(1, {"loss": 1.0})
        recorder._write()
        recorder.step(2, {"loss": 1.0})
        recorder.end("finished")
    (warning,) = caplog.records
    assert "writes no record" in warning.getMessage()
    assert (tmp_path / "rank0.jsonl").stat().st_size == size


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 0, {"rank": 0}, CpuAccelerator(), seconds=60)
    recorder.step(1, {})
    if (pid := os.fork()) == 0:
        recorder.end("ended")
        os._exit(0)
    os.waitpid(pid, 0)
    recorder.end("finished")
    record = read_rank(0, tmp_path / "rank0.jsonl")
    assert (list(record.columns.step), record.last) == ([1], "finished")


def test_a_flag_switches_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ds_report.recording import record_into

    from ds_core.setup.compose import compose

    (tmp_path / "more.json").write_text('{"run_record": {"folder": "x"}, "gradient_clipping": 0.5}')
    monkeypatch.setenv("DS_CONFIG_OVERRIDES", str(tmp_path / "more.json"))
    monkeypatch.chdir(tmp_path)
    for name, value in record_into("runs/a", []).items():
        monkeypatch.setenv(name, value)
    config = compose({"gradient_clipping": 1.0, "run_record": {"folder": "y", "seconds": 7}}).config
    assert config.section("run_record").directory() == tmp_path / "runs" / "a"  # type: ignore[union-attr]
    assert config.core.gradient_clipping == 0.5
    monkeypatch.setenv("DS_CONFIG_OVERRIDES", "no-such-file.json")
    with pytest.raises(ConfigError, match="no-such-file"):
        compose({})


@pytest.mark.slow
def test_the_whole_way(tmp_path: Path) -> None:
    """``dscore run --record``, of a script that knows nothing of it, and that fails on one rank."""
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, ds_core\n"
        "model = torch.nn.Linear(4, 2)\n"
        "config = {'train_batch_size': 4, 'optimizer': {'type': 'AdamW'}}\n"
        "engine, *_ = ds_core.initialize(model=model, config=config)\n"
        "for step in range(20):\n"
        "    engine.backward(engine(torch.ones(2, 4)).square().sum())\n"
        "    engine.step()\n"
        "if engine.global_rank == 1:\n"
        "    raise ValueError('no more data')\n"
        "engine.destroy()\n"
    )
    words = [
        sys.executable,
        "-m",
        "ds_cli",
        "run",
        "--nproc",
        "2",
        "--record",
        "runs/a",
        str(script),
    ]
    run(words, cwd=tmp_path, status=1)
    folder = tmp_path / "runs" / "a"
    ranks = [read_rank(rank, folder / f"rank{rank}.jsonl") for rank in range(2)]
    assert [list(r.columns.step) for r in ranks] == [list(range(1, 21))] * 2
    stands = standing(ranks, {rank: read_now(folder, rank) for rank in range(2)})
    assert (stands.state, stands.text) == (State.FAILED, "rank 1: ValueError: no more data")
    run([sys.executable, "-m", "ds_cli", "report", str(folder)], cwd=tmp_path)
    assert "no more data" in (folder / "report.html").read_text()
