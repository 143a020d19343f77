"""`Background`: order, who waits for whom, failures, the end of a program, forked processes."""

from __future__ import annotations

import ast
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_monitor_kit import Background
from ds_testing import MonitorConformance

from ds_core.engine import MonitorMaster
from ds_core.entries import Event


class Slow:
    """Keeps events; each write waits for `go`."""

    name = "slow"

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.done: list[str] = []
        self.go = threading.Event()
        self.entered = threading.Event()
        self.fails: BaseException | None = None

    def write_events(self, events: Sequence[Event]) -> None:
        self.entered.set()
        self.go.wait()
        if self.fails is not None:
            raise self.fails
        self.events += events

    def flush(self) -> None:
        self.done.append(f"flush after {len(self.events)}")

    def close(self) -> None:
        self.done.append(f"close after {len(self.events)}")


class Lines(Slow):
    """Writes one line per event."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.go.set()

    def flush(self) -> None:
        if self.events:
            with self.path.open("a") as file:
                file.writelines(f"{e.name!r}\t{e.value!r}\t{e.step}\n" for e in self.events)
            self.events = []

    close = flush


class TestBackground(MonitorConformance):
    def make_monitor(self, tmp_path: Path) -> Background:
        return Background(Lines(tmp_path / "lines"))

    def read_events(self, tmp_path: Path) -> list[tuple[str, float, int]]:
        path = tmp_path / "lines"
        rows = [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []
        return [(ast.literal_eval(name), float(value), int(step)) for name, value, step in rows]


def test_a_step_does_not_wait_and_order_is_kept() -> None:
    slow = Slow()
    master = MonitorMaster([Background(slow)])
    for step in range(100):
        master.write_events([("loss", float(step), step)])
    assert slow.events == []  # the first write has not returned
    slow.go.set()
    master.flush()
    assert [e.step for e in slow.events] == list(range(100)) and slow.done == ["flush after 100"]
    master.write_events([("loss", 0.5, 100)])
    master.close()
    assert slow.done[1:] == ["close after 101"]


def test_a_tensor_may_change_after_it_was_given() -> None:
    slow = Slow()
    master = MonitorMaster([Background(slow)])
    loss = torch.tensor(1.5)
    master.write_events([("loss", loss, 1)])
    master.monitors[0].write_events(
        [Event("a", 1.0, 2), Event("b", loss, 2), Event("c", loss.half(), 2)]
    )  # type: ignore[arg-type]
    loss.zero_()
    slow.go.set()
    master.close()
    assert slow.events == [("loss", 1.5, 1), ("a", 1.0, 2), ("b", 1.5, 2), ("c", 1.5, 2)]


def test_a_failure_is_one_warning_and_the_others_go_on(caplog: pytest.LogCaptureFixture) -> None:
    bad = Slow()
    good = Slow()
    bad.fails = OSError("the disk is full")
    bad.go.set()
    good.go.set()
    master = MonitorMaster([Background(bad), Background(good)])
    master.write_events([("loss", 1.0, 1)])
    master.flush()
    for step in range(2, 10):
        master.write_events([("loss", 1.0, step)])
    master.close()
    assert [r.getMessage() for r in caplog.records] == [
        "monitor slow failed in flush (OSError: the disk is full); it is switched off and training "
        "continues"
    ]
    assert bad.done == ["close after 0"] and len(good.events) == 9


def test_one_that_is_stuck_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    stuck = Slow()
    master = MonitorMaster([Background(stuck, queued=2, patience=0.01)])
    for step in range(6):
        master.write_events([("loss", 1.0, step)])
    assert caplog.text.count("taken nothing for 0.01 s") == 1 and not master.enabled
    stuck.go.set()
    stuck = Slow()
    master = MonitorMaster([Background(stuck, last_patience=0.01)])
    master.write_events([("loss", 1.0, 1)])
    master.close()
    assert "no progress for 0.01 s" in caplog.text
    stuck.go.set()


def test_one_that_is_forgotten_finishes() -> None:
    slow = Slow()
    slow.go.set()
    background = Background(slow)
    background.write_events([Event("loss", 1.0, 1)])
    thread = background._worker._thread
    assert thread is not None
    del background
    thread.join(60)
    assert slow.done == ["close after 1"]


def test_it_has_no_thread_until_something_is_written() -> None:
    before = threading.active_count()
    background = Background(Slow())
    background.flush()
    background.close()
    assert threading.active_count() == before
    with pytest.raises(ValueError, match="slow is closed"):
        background.write_events([Event("loss", 1.0, 1)])


ENDS = """
import atexit, os, sys, time
from ds_monitor_kit import Background
from ds_core.entries import Event
class Monitor:
    name = "m"
    open, waiting = True, 0
    def write_events(self, events):
        time.sleep(0.02)
        assert self.open, "the package has ended the run"
        self.waiting += len(events)
    def flush(self): print("written", self.waiting, flush=True)
    def close(self): pass
monitor = Monitor()
atexit.register(setattr, monitor, "open", False)  # as packages do
background = Background(monitor)
for step in range(20):
    background.write_events([Event("loss", 1.0, step)])
if sys.argv[1] == "fork":
    if os.fork() == 0:
        background.write_events([Event("loss", 2.0, 99)])
        background.close()
        print("child", flush=True)
        sys.exit(0)
    os.wait()
assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("how", "said"), [("plain", "written 20\n"), ("fork", "child\nwritten 20\n")]
)
def test_the_end_of_a_program_and_a_fork_lose_and_repeat_nothing(how: str, said: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", ENDS, how],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, said, "")


def test_what_fails_at_the_end_is_told(caplog: pytest.LogCaptureFixture) -> None:
    bad = Slow()
    bad.fails = OSError("gone")
    bad.go.set()
    background = Background(bad)
    background.write_events([Event("loss", 1.0, 1)])
    with caplog.at_level(logging.WARNING):
        background._worker._at_exit()
    assert "monitor slow failed at the end: OSError: gone" in caplog.text
