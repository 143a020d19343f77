"""Ranks and whole hosts of an elastic run are killed at random moments; it goes on from the last
checkpoint.

Hosts are launchers on this machine, which meet at a store of the test's own: any of them may be
killed, with all that it has started. Their clocks are hours apart. Nothing before the last
checkpoint is done again, and the final weights are those of an undisturbed run.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing.processes import clean_environment, free_port
from torch.distributed import TCPStore  # type: ignore[attr-defined]

EVERY = 4
PER_KILL = 16
HOSTS = 3
RANKS = 1
KILLS = 3

SCRIPT = """
import json, os, pathlib, sys, time
import torch, ds_core
from torch import nn

folder, steps = pathlib.Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(3)
data = torch.utils.data.TensorDataset(torch.arange(300.0).reshape(50, 6).sin(), torch.arange(50.0).reshape(50, 1).cos())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 1))
    def forward(self, x, y):
        return (self.layers(x) - y).square().mean()

config = {
    "elasticity": {"enabled": True, "max_train_batch_size": 12, "micro_batch_sizes": [1, 2, 3], "max_gpus": 6},
    "autosave": {"folder": str(folder / "run"), "every": int(sys.argv[3])},
    "zero_optimization": {"stage": 2},
    "checkpoint": {"keep_last": 3},
    "optimizer": {"type": "Adam", "params": {"lr": 0.02}},
}
engine, *_ = ds_core.initialize(model=Net(), config=config, training_data=data)
engine.resume()
with open(folder / f"log-{time.time():.3f}-{os.getpid()}", "w", buffering=1) as log:
    while engine.global_steps < steps:
        step = engine.global_steps
        loss = float(engine.train_batch())
        row = {"step": step, "loss": loss, "world": engine.world_size, "rank": engine.global_rank}
        log.write(json.dumps(row) + "\\n")
        time.sleep(float(sys.argv[4]))
if engine.global_rank == 0:
    torch.save([p.detach() for p in engine.module.parameters()], folder / "final")
"""


CLOCK = """
import datetime

class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(hours={hours})

datetime.datetime = Shifted
"""


class Hosts:
    """Launchers of one elastic run, by number; each in a session of its own, as are its ranks."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder = folder
        self.steps = steps
        self.port = free_port()
        self.store = TCPStore(
            "127.0.0.1",
            self.port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=5),
        )
        self.running: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(HOSTS):
            (folder / f"clock{number}").mkdir(parents=True)
            (folder / f"clock{number}" / "sitecustomize.py").write_text(CLOCK.format(hours=number))
        (folder / "train.py").write_text(SCRIPT)

    def start(self, number: int) -> None:
        words = [
            "run",
            "--nnodes",
            f"1:{HOSTS}",
            "--nproc",
            str(RANKS),
            "--rdzv-endpoint",
            f"127.0.0.1:{self.port}",
        ]
        words += [
            "--max-restarts",
            "1000",
            "--grace",
            "2",
            str(self.folder / "train.py"),
            str(self.folder),
        ]
        with (self.folder / f"host{number}.out").open("ab") as out:
            self.running[number] = subprocess.Popen(
                [sys.executable, "-m", "ds_cli", *words, str(self.steps), str(EVERY), "0.05"],
                env=clean_environment(
                    GLOO_SOCKET_IFNAME="lo", PYTHONPATH=str(self.folder / f"clock{number}")
                ),
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def ranks(self, number: int) -> list[int]:
        """The processes of a host's ranks."""
        launcher = self.running[number].pid
        children = Path(f"/proc/{launcher}/task/{launcher}/children")
        pids = [int(pid) for pid in children.read_text().split()] if children.exists() else []
        return [pid for pid in pids if "worker.py" in _words(pid)]

    def kill(self, number: int) -> None:
        """As if the host's power went off: nobody in it does anything more."""
        pids = [self.running[number].pid, *self.ranks(number)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.running.pop(number).wait()

    def close(self) -> None:
        for number in list(self.running):
            self.kill(number)

    def rows(self) -> list[list[dict[str, Any]]]:
        """What each rank 0 has done so far, start by start."""
        logs = sorted(self.folder.glob("log-*"))
        found = [
            [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
            for log in logs
        ]
        return [rows for rows in found if rows and rows[0]["rank"] == 0]

    def done(self) -> int:
        """How many steps the run has come to."""
        return max((rows[-1]["step"] + 1 for rows in self.rows()), default=0)

    def saved(self) -> int:
        """The step of the last checkpoint; 0 for none."""
        latest = self.folder / "run" / "latest"
        return int(latest.read_text().strip().removeprefix("global_step")) if latest.exists() else 0

    def wait_for(self, step: int) -> None:
        end = time.monotonic() + 120
        while self.done() < step:
            dead = {n: p.returncode for n, p in self.running.items() if p.poll() is not None}
            assert not dead, f"launchers have ended: {dead}\n" + self.output()
            assert time.monotonic() < end, f"the run stands at step {self.done()}\n" + self.output()
            time.sleep(0.05)

    def output(self) -> str:
        return "\n".join(
            f"-- {file.name}\n{file.read_text()[-3000:]}"
            for file in sorted(self.folder.glob("*.out"))
        )


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


@contextlib.contextmanager
def hosts(folder: Path, steps: int) -> Iterator[Hosts]:
    made = Hosts(folder, steps)
    try:
        yield made
    finally:
        made.close()


def undisturbed(folder: Path, steps: int) -> dict[int, float]:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    words = [sys.executable, str(folder / "train.py"), str(folder), str(steps), str(steps + 1), "0"]
    subprocess.run(words, check=True, env=clean_environment())
    (log,) = folder.glob("log-*")
    return {row["step"]: row["loss"] for row in map(json.loads, log.read_text().splitlines())}


def disturb(run: Hosts, chance: random.Random, kills: int) -> list[str]:
    """Kill a rank or a host now and then, or tell a host to stop.

    Hosts come back at once, or when the run has gone on without them.
    """
    seen = []
    for count in range(1, kills + 1):
        run.wait_for(count * PER_KILL - chance.randint(0, PER_KILL // 2))
        time.sleep(chance.uniform(0, 0.25))
        number = chance.randrange(HOSTS)
        before = run.saved()
        missing = None
        pids = run.ranks(number)
        kind = chance.random()
        if kind < 0.2:
            seen.append(f"host {number} is told to stop at step {run.done()}")
            run.running[number].terminate()
            code = run.running.pop(number).wait(timeout=60)
            # One that has just been started has no ranks yet, and perhaps no handler.
            assert code == 75 or (not pids and code in (-signal.SIGTERM, 128 + signal.SIGTERM)), (
                run.output()
            )
            # nothing is done again
            before = run.done()
            missing = number
        elif kind < 0.6 and pids:
            seen.append(f"a rank of host {number} at step {run.done()}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(chance.choice(pids), signal.SIGKILL)
        else:
            seen.append(f"host {number} at step {run.done()}")
            run.kill(number)
            missing = number
        # a host that had not joined yet stops nobody
        began = len(run.rows())
        far = run.done() + EVERY
        if missing is not None and chance.random() < 0.5:
            run.start(missing)
            missing = None
        at = time.monotonic()
        while len(run.rows()) == began and run.done() < far:
            run.wait_for(0)
            assert time.monotonic() - at < 90, f"nothing goes on after {seen[-1]}\n" + run.output()
            time.sleep(0.05)
        seen[-1] += (
            f", on after {time.monotonic() - at:.1f} s from step {run.rows()[-1][0]['step']}, "
            f"saved was {before}"
        )
        assert len(run.rows()) == began or run.rows()[-1][0]["step"] >= before, seen
        if missing is not None:
            run.start(missing)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(17))
def test_kills_lose_no_step_before_the_last_checkpoint(seed: int, tmp_path: Path) -> None:
    steps = (KILLS + 4) * PER_KILL
    with hosts(tmp_path / "elastic", steps) as run:
        for number in range(HOSTS):
            run.start(number)
        seen = disturb(run, random.Random(seed), KILLS)
        for process in run.running.values():
            assert process.wait(timeout=180) == 0, run.output()
        starts = run.rows()
    rows = [row for part in starts for row in part]
    print(*seen, sep="\n")
    expected = undisturbed(tmp_path / "alone", steps)
    # A step after which the ranks were told to stop is done and saved, but train_batch ends the
    # program. After the last step no start has a row.
    told = {part[0]["step"] - 1 for part in starts} | {steps - 1}
    assert set(range(steps)) - {row["step"] for row in rows} <= told
    assert {row["world"] for row in rows} <= {RANKS * n for n in range(1, HOSTS + 1)}
    for row in rows:
        assert row["loss"] == pytest.approx(expected[row["step"]], rel=1e-3, abs=1e-6), row
    for mine, theirs in zip(
        *(torch.load(tmp_path / name / "final") for name in ("elastic", "alone")), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
