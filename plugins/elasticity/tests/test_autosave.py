"""Checkpoints by themselves, an orderly end on SIGTERM at any rank, and runs that go on at other
numbers of ranks.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_elasticity.autosave import PREEMPTED
from ds_elasticity.loader import WholeBatches
from ds_testing import ObserverConformance
from torch import nn
from torch.utils.data import DistributedSampler, TensorDataset

import ds_core
from ds_core.engine import LoaderRequest
from ds_core.errors import UsageError

ELASTIC = {
    "enabled": True,
    "max_train_batch_size": 12,
    "micro_batch_sizes": [1, 2, 3],
    "max_gpus": 4,
    "version": 0.1,
}
DATA = TensorDataset(
    torch.arange(300.0).reshape(50, 6).sin(), torch.arange(50.0).reshape(50, 1).cos()
)


class Net(nn.Module):
    """Its loss is a mean over samples, so any way to share a batch gives the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = (self.layers(x) - y).square().mean()
        return loss


def run_until(
    until: int,
    autosave: dict[str, Any] | None,
    told: int | None = None,
    config: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Steps up to `until`; the last rank gets SIGTERM in step `told`.

    What happened, the exit code included.
    """
    full = {
        "elasticity": ELASTIC,
        "optimizer": {"type": "Adam", "params": {"lr": 0.05}},
        **(config or {}),
    }
    full |= {} if autosave is None else {"autosave": autosave}
    engine, *_ = ds_core.initialize(model=Net(), config=full, training_data=DATA)
    path = engine.resume() if autosave is not None else None
    losses = []
    code = 0
    try:
        while engine.global_steps < until:
            if engine.global_steps == told and engine.global_rank == engine.world_size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            step = engine.global_steps
            losses.append((step, float(engine.train_batch())))
    except SystemExit as ended:
        code = int(str(ended.code))
    step = engine.global_steps
    engine.destroy()
    weights = [p.tolist() for p in engine.module.parameters()]
    handler = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    return {
        "path": path,
        "losses": losses,
        "code": code,
        "step": step,
        "weights": weights,
        "restored": handler,
    }


@pytest.mark.fast_cases("config0")
@pytest.mark.parametrize(
    "config", [{}, {"zero_optimization": {"stage": 2}, "checkpoint": {"async": True}}]
)
def test_a_run_that_is_told_to_stop_goes_on_at_other_sizes(
    ranks: Any, tmp_path: Path, config: dict[str, Any]
) -> None:
    (whole,) = ranks(1, run_until, 12, None)
    autosave = {"folder": str(tmp_path / "run")}
    parts = [
        ranks(size, run_until, 12, autosave, told, config)
        for size, told in ((3, 4), (2, 8), (4, None))
    ]
    assert [{r["code"] for r in rows} for rows in parts] == [{PREEMPTED}, {PREEMPTED}, {0}]
    assert [rows[0]["step"] for rows in parts] == [5, 9, 12]
    assert [Path(rows[0]["path"] or ".").name for rows in parts] == [
        "",
        "global_step5",
        "global_step9",
    ]
    assert all(r["restored"] for rows in parts for r in rows)
    losses = dict(loss for rows in parts for loss in rows[0]["losses"])
    expected = dict(whole["losses"])
    # done and saved, but train_batch ended the program
    assert expected.keys() - losses.keys() == {4, 8}
    torch.testing.assert_close(
        losses, {step: expected[step] for step in losses}, rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(parts[2][0]["weights"], whole["weights"], rtol=1e-4, atol=1e-6)


def test_checkpoints_come_by_themselves_and_a_damaged_one_is_passed_over(
    ranks: Any, tmp_path: Path
) -> None:
    autosave = {"folder": str(tmp_path), "every": 3, "on_sigterm": False}
    ranks(1, run_until, 7, autosave)
    assert sorted(p.name for p in tmp_path.glob("global_step*")) == ["global_step3", "global_step6"]
    damaged = next((tmp_path / "global_step6").glob("*.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    (again,) = ranks(1, run_until, 8, autosave)
    assert again["path"] == str(tmp_path / "global_step3")
    assert [step for step, _ in again["losses"]] == [3, 4, 5, 6, 7]


PROGRAM = """
import os, signal, sys, torch, ds_core
data = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
class Net(torch.nn.Linear):
    def forward(self, x, y): return (super().forward(x) - y).square().mean()
config = {"train_batch_size": 2, "optimizer": {"type": "SGD"}, "autosave": {"folder": sys.argv[1]}}
own = []
if "own" in sys.argv: signal.signal(signal.SIGTERM, lambda *_: own.append(1))
engine, *_ = ds_core.initialize(model=Net(2, 1), config=config, training_data=data)
engine.resume()
print("from", engine.global_steps, flush=True)
while engine.global_steps < 6:
    engine.train_batch()
    if engine.global_steps == 2:
        if os.fork() == 0:  # its SIGTERM is not the run's
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(9)
        print("child", os.wait()[1], flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
print("own", own, "done", flush=True)
"""


@pytest.mark.slow
def test_a_program_ends_with_the_exit_code_and_the_same_command_goes_on(tmp_path: Path) -> None:
    from ds_testing.processes import clean_environment

    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "run"), "own"]
    ends = [
        subprocess.run(command, capture_output=True, text=True, env=clean_environment())
        for _ in range(2)
    ]
    first, second = ends
    assert (first.returncode, first.stdout.split("\n")[:-1]) == (
        75,
        ["from 0", f"child {int(signal.SIGTERM)}"],
    )
    assert (
        "rank 0 on" in first.stderr
        and "was asked to stop (SIGTERM): all ranks save step 3 and end" in first.stderr
    )
    assert (second.returncode, second.stdout) == (0, "from 3\nown [] done\n"), second.stderr


def test_outside_the_main_thread_sigterm_is_left_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[Any] = []
    config = {"autosave": {"folder": str(tmp_path)}}
    thread = threading.Thread(target=lambda: ended.append(run_until(2, None, None, config)))
    thread.start()
    thread.join()
    assert ended[0]["step"] == 2
    assert (
        "autosave.on_sigterm has no effect: training does not run in the program's main thread"
        in caplog.text
    )


@pytest.mark.parametrize("drop_last", [False, True])
def test_each_step_sees_the_same_samples_at_every_number_of_ranks(drop_last: bool) -> None:
    def steps(replicas: int) -> list[set[int]]:
        requests = [
            LoaderRequest(DATA, 1, replicas, index, drop_last=drop_last)
            for index in range(replicas)
        ]
        orders = [list(WholeBatches(request, 12)) for request in requests]
        share = 12 // replicas
        return [
            {i for order in orders for i in order[at : at + share]}
            for at in range(0, len(orders[0]), share)
        ]

    assert len(steps(1)) == (4 if drop_last else 5) and set.union(*steps(1)[:4]) <= set(range(50))
    assert steps(1) == steps(2) == steps(3) == steps(4)
    even = TensorDataset(torch.ones(48, 1))
    other: DistributedSampler[Any] = DistributedSampler(even, 2, 1, shuffle=True, seed=0)
    assert list(WholeBatches(LoaderRequest(even, 1, 2, 1), 12)) == list(other)


def test_fewer_samples_than_one_batch() -> None:
    with pytest.raises(UsageError, match="50 samples, fewer than the train batch of 60"):
        WholeBatches(LoaderRequest(DATA, 1, drop_last=True), 60)
    assert len(WholeBatches(LoaderRequest(DATA, 1), 120)) == 120


def example(folder: str, steps: int) -> str:
    """What rank 0 of the example prints."""
    said = io.StringIO()
    sys.argv = ["train.py", "--folder", folder, "--steps", str(steps)]
    with contextlib.redirect_stdout(said):
        runpy.run_path(
            str(Path(__file__).parents[3] / "examples/elastic/train.py"), run_name="__main__"
        )
    return said.getvalue()


@pytest.mark.slow
def test_the_example_goes_on_with_another_number_of_ranks(ranks: Any, tmp_path: Path) -> None:
    assert ranks(1, example, str(tmp_path), 51)[0].endswith(", 1 ranks\n")
    said = ranks(2, example, str(tmp_path), 100)[0].splitlines()
    assert said[0] == "going on from step 50 with 2 ranks" and said[1].startswith("step 100: loss ")


class TestAutosave(ObserverConformance):
    name = "autosave"
    config = {"autosave": {"folder": "unused"}}
