"""An elastic run over the hosts of a hostfile: they die, come back, lose their power; it goes
on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ds_testing.processes import clean_environment
from ds_testing_hosts.lab import Lab
from sites import GOING_ON, LIMIT, left

pytestmark = pytest.mark.hosts
EVERY = 5


class Run:
    """An elastic run on a, b and c, and what its ranks 0 have written, start by start."""

    def __init__(self, lab: Lab, folder: Path, *more: str) -> None:
        self.lab = lab
        self.folder = folder
        self.more = more
        self.every = EVERY
        (folder / "hosts.txt").write_text("a slots=1\nb slots=1\nc slots=1\n")

    def start(self) -> None:
        words = ["run", "--hostfile", "hosts.txt", "--elastic_training", "--min_elastic_nodes", "1"]
        words += [GOING_ON, str(self.folder), str(self.every), "0.1", *self.more]
        with (self.folder / "output").open("a") as out:
            self.process = self.lab.head.popen(
                [sys.executable, "-m", "ds_cli", *words], cwd=self.folder, stdout=out
            )

    def starts(self) -> list[list[dict[str, Any]]]:
        texts = [file.read_text() for file in sorted(self.folder.glob("start-*"))]
        found = [
            [json.loads(line) for line in text.splitlines() if line.endswith("}")] for text in texts
        ]
        return [rows for rows in found if rows]

    def saved(self) -> int:
        """The step of the last checkpoint; 0 for none."""
        latest = self.folder / "checkpoints/latest"
        return int(latest.read_text().strip().removeprefix("global_step")) if latest.exists() else 0

    def wait(self, what: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT
        while not what():
            assert self.process.poll() is None and time.monotonic() < end, (
                self.folder / "output"
            ).read_text()
            time.sleep(0.05)

    def goes_on_after(self, act: Callable[[], object], world: int) -> None:
        """`act`, and wait for steps of `world` ranks; none before the last checkpoint is done
        again.
        """
        began = len(self.starts())
        saved = self.saved()
        at = time.monotonic()
        act()
        self.wait(lambda: len(self.starts()) > began and self.starts()[-1][-1]["world"] == world)
        first = self.starts()[began][0]["step"]
        print(
            f"{getattr(act, '__name__', act)}: on after {time.monotonic() - at:.1f} s at step "
            f"{first}, saved {saved}"
        )
        assert min(rows[0]["step"] for rows in self.starts()[began:]) >= saved
        self.wait(lambda: len(self.starts()[-1]) > EVERY + 2)

    def end(self) -> int:
        """The exit code, when all has ended; nothing is left on any host."""
        code = self.process.wait(timeout=LIMIT)
        end = time.monotonic() + 5
        while remains := [(host.name, p.words) for host in self.lab.everyone for p in left(host)]:
            assert time.monotonic() < end, remains
            time.sleep(0.1)
        return code


def undisturbed(folder: Path, steps: int) -> list[float]:
    """The losses of one process."""
    folder.mkdir()
    (folder / "steps").write_text(str(steps))
    subprocess.run(
        [sys.executable, GOING_ON, str(folder), "0", "0"], check=True, env=clean_environment()
    )
    (log,) = folder.glob("start-*")
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def test_hosts_die_come_back_and_the_run_is_told_to_stop(
    lab: Callable[..., Lab], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    hosts = lab("a", "b", "c", ssh=True, shared=[tmp_path])
    run = Run(hosts, folder)
    run.goes_on_after(run.start, 3)
    run.goes_on_after(hosts.host("b").kill, 2)
    run.goes_on_after(hosts.host("b").boot, 3)
    run.goes_on_after(hosts.host("a").crash, 2)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 75
    said = (folder / "output").read_text()
    assert said.count("stopped by SIGTERM, exit code 75: a checkpoint was saved first") == 1, said
    assert {f"lost host {name} (rank" in said for name in "ab"} == {True}, said
    hosts.host("a").boot()
    done = run.starts()[-1][-1]["step"] + 1
    run.goes_on_after(run.start, 3)
    again = next(rows for rows in run.starts() if rows[0]["step"] >= done)
    # the step after which they stopped is saved, but not written down
    assert again[0]["step"] in (done, done + 1)
    steps = run.starts()[-1][-1]["step"] + 30
    (folder / "soon").write_text(str(steps))
    (folder / "soon").rename(folder / "steps")
    assert run.end() == 0, (folder / "output").read_text()
    expected = undisturbed(tmp_path / "alone", steps)
    rows = [row for part in run.starts() for row in part]
    for row in rows:
        assert row["loss"] == pytest.approx(expected[row["step"]], rel=1e-5), row
    missing = set(range(steps)) - {row["step"] for row in rows}
    assert missing <= {part[0]["step"] - 1 for part in run.starts()}


def test_a_run_goes_on_from_the_memory_of_a_lost_hosts_neighbour(
    lab: Callable[..., Lab], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    hosts = lab("a", "b", "c", ssh=True, shared=[tmp_path])
    every = 3
    run = Run(hosts, folder, str(every))
    run.every = 0  # the disk is saved to before a host joins only
    run.goes_on_after(run.start, 3)
    for name in "bc":
        run.wait(lambda: run.starts()[-1][-1]["step"] > run.starts()[-1][0]["step"] + 3 * every)
        run.goes_on_after(hosts.host(name).kill, 2)
        *_, before, after = run.starts()
        assert run.saved() < after[0]["step"]
        # the set of the last steps may not have been whole
        assert before[-1]["step"] - 2 * every <= after[0]["step"] <= before[-1]["step"] + 1
        run.goes_on_after(hosts.host(name).boot, 3)
    (folder / "soon").write_text("0")
    (folder / "soon").rename(folder / "steps")
    assert run.end() == 0, (folder / "output").read_text()
    for host in hosts.everyone:
        assert "dscore-peer" not in host.run(["ls", "/dev/shm"])
