"""What monitors that write files share, with the least sink there can be: paths, whole appends,
when it writes.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from ds_monitor_kit import BufferedMonitor, JobFolder, append_whole
from ds_testing import MonitorConformance
from pydantic import ValidationError

from ds_core.engine import MonitorMaster
from ds_core.entries import Event

FullAt = Callable[[int], AbstractContextManager[None]]


class Lines:
    """A line of JSON for each event, in one file below the folder."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "events"
        self.lines: list[str] = []

    @property
    def waiting(self) -> int:
        return len(self.lines)

    def add(self, events: Sequence[Event]) -> None:
        self.lines += [json.dumps(event) + "\n" for event in events]

    def write(self) -> None:
        if self.lines:
            self.directory.mkdir(parents=True, exist_ok=True)
            append_whole(self.path, "".join(self.lines).encode())
            self.drop()

    def drop(self) -> None:
        self.lines.clear()


def make(directory: Path, **buffering: Any) -> BufferedMonitor:
    return BufferedMonitor("lines", Lines(directory), **buffering)


def read(directory: Path) -> list[Event]:
    path = directory / "events"
    return (
        [Event(*json.loads(line)) for line in path.read_text().splitlines()]
        if path.exists()
        else []
    )


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TestBufferedMonitor(MonitorConformance):
    relative_tolerance = 0.0

    def make_monitor(self, tmp_path: Path) -> BufferedMonitor:
        return make(tmp_path / "job")

    def read_events(self, tmp_path: Path) -> list[tuple[str, float, int]]:
        return [tuple(event) for event in read(tmp_path / "job")]


# -- the section -----------------------------------------------------------------------------------


def test_the_defaults_of_the_documents() -> None:
    assert JobFolder().model_dump() == {
        "enabled": False,
        "output_path": "",
        "job_name": "DeepSpeedJobName",
    }


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../up",
        "a/../../b",
        "/etc",
        "a//b",
        "a/",
        "\\\\host\\share",
        "..\\up",
        "C:",
        "C:x",
        "a\0b",
    ],
)
def test_a_job_name_stays_inside(name: str) -> None:
    with pytest.raises(
        ValidationError, match="must name a folder inside output_path, such as run1 or team/run1"
    ):
        JobFolder(job_name=name)


@pytest.mark.parametrize(
    "fields",
    [{"enabled": 1}, {"enabled": "true"}, {"output_path": None}, {"job_name": 3}, {"job": "x"}],
    ids=repr,
)
def test_types_and_keys_are_strict(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        JobFolder(**fields)


def test_a_path_without_nul() -> None:
    with pytest.raises(ValidationError, match="a path cannot hold a NUL character"):
        JobFolder(output_path="a\0b")


def test_output_path_and_job_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        JobFolder(output_path=str(tmp_path / "out"), job_name="a/b").directory()
        == tmp_path / "out" / "a" / "b"
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        JobFolder(output_path="~/runs", job_name="team/run 1").directory()
        == tmp_path / "runs" / "team" / "run 1"
    )


def test_an_empty_output_path_is_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert JobFolder().directory() == tmp_path / "DeepSpeedJobName"
    assert JobFolder(output_path="runs", job_name="x").directory() == tmp_path / "runs" / "x"


# -- appending -------------------------------------------------------------------------------------


def test_appending_makes_the_file_and_goes_on_in_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    append_whole(path, b"one\n")
    append_whole(path, b"")
    append_whole(path, b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


def test_appending_is_whole_or_not_at_all(tmp_path: Path, full_at: FullAt) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before\n")
    with full_at(10), pytest.raises(OSError, match="File too large") as caught:
        append_whole(path, b"123456789\n")  # three bytes fit
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(path))
    assert path.read_bytes() == b"before\n"


def test_appending_where_no_folder_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        append_whole(tmp_path / "missing" / "file", b"1")


# -- taking events ---------------------------------------------------------------------------------


def test_numbers_of_other_types_arrive_as_float_and_int(tmp_path: Path) -> None:
    import numpy
    import torch

    sink = Lines(tmp_path)
    monitor = BufferedMonitor("lines", sink)
    values = [3, True, torch.tensor(0.5), numpy.float32(0.25)]
    monitor.write_events([Event("x", value, torch.tensor(i)) for i, value in enumerate(values)])  # type: ignore[arg-type]
    assert sink.lines == [
        '["x", 3.0, 0]\n',
        '["x", 1.0, 1]\n',
        '["x", 0.5, 2]\n',
        '["x", 0.25, 3]\n',
    ]
    monitor.close()


@pytest.mark.parametrize("value", ["many", None, [1.0], 1j, 10**400])
def test_what_is_no_number_is_named_and_nothing_is_taken(tmp_path: Path, value: object) -> None:
    monitor = make(tmp_path)
    with pytest.raises(TypeError, match=r"event 'loss': step 2 and value .* must be numbers"):
        monitor.write_events([Event("loss", 1.0, 1), Event("loss", value, 2)])  # type: ignore[arg-type]
    monitor.close()
    assert list(tmp_path.iterdir()) == []


# -- buffering -------------------------------------------------------------------------------------


def test_nothing_is_touched_before_it_is_due(tmp_path: Path) -> None:
    clock = Clock()
    monitor = make(tmp_path / "job", flush_events=100, flush_seconds=5.0, clock=clock)
    monitor.write_events([Event("loss", 1.0, i) for i in range(99)])
    assert list(tmp_path.iterdir()) == []
    monitor.write_events([Event("loss", 1.0, 99)])
    assert len(read(tmp_path / "job")) == 100
    clock.now += 4.9
    monitor.write_events([Event("loss", 1.0, 100)])
    assert len(read(tmp_path / "job")) == 100
    clock.now += 0.1
    monitor.write_events([Event("loss", 1.0, 101)])
    assert len(read(tmp_path / "job")) == 102
    monitor.close()


def test_a_flush_by_hand_starts_the_time_again(tmp_path: Path) -> None:
    clock = Clock()
    monitor = make(tmp_path, flush_seconds=5.0, clock=clock)
    clock.now += 4.0
    monitor.flush()
    clock.now += 4.0
    monitor.write_events([Event("loss", 1.0, 1)])
    assert read(tmp_path) == []
    monitor.close()


def test_after_close_writing_is_an_error(tmp_path: Path) -> None:
    monitor = make(tmp_path)
    monitor.close()
    with pytest.raises(ValueError, match="is closed") as caught:
        monitor.write_events([Event("loss", 1.0, 1)])
    assert str(caught.value) == f"the monitor lines of {tmp_path} is closed"


# -- ending without close --------------------------------------------------------------------------

SCRIPT = """
import os, runpy, sys
from pathlib import Path
from ds_core.entries import Event
monitor = runpy.run_path(sys.argv[1])["make"](Path(sys.argv[2]))
monitor.write_events([Event("loss", 1.0, 1)])
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_script_that_ends_without_closing_loses_nothing_and_writes_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, __file__, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert read(tmp_path) == [("loss", 1.0, 1)]


@pytest.mark.slow
def test_a_failure_at_the_end_is_one_warning_with_the_number_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monitor = make(tmp_path / "file" / "job")
    monitor.write_events([Event("loss", 1.0, 1), Event("loss", 2.0, 2)])
    with caplog.at_level(logging.WARNING):
        del monitor
        gc.collect()
    (record,) = caplog.records
    assert (
        f"monitor lines: 2 events below {tmp_path / 'file' / 'job'} were not written: "
        in record.getMessage()
    )


# -- failing ---------------------------------------------------------------------------------------


def test_what_was_not_written_waits_for_the_next_flush(tmp_path: Path, full_at: FullAt) -> None:
    monitor = make(tmp_path)
    monitor.write_events([Event("loss", 1.0, 1)])
    monitor.flush()
    monitor.write_events([Event("loss", 2.0, 2), Event("loss", 3.0, 3)])
    with full_at(30), pytest.raises(OSError, match="File too large"):
        monitor.flush()
    assert read(tmp_path) == [("loss", 1.0, 1)]
    monitor.flush()
    assert read(tmp_path) == [("loss", 1.0, 1), ("loss", 2.0, 2), ("loss", 3.0, 3)]
    monitor.close()


def test_closing_on_a_full_disk_raises_once(tmp_path: Path, full_at: FullAt) -> None:
    monitor = make(tmp_path)
    monitor.write_events([Event("loss", 1.0, 1)])
    with full_at(5), pytest.raises(OSError, match="File too large"):
        monitor.close()
    monitor.flush()
    monitor.close()
    assert read(tmp_path) == []


def test_a_monitor_that_cannot_write_is_switched_off_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    bad = make(tmp_path / "file" / "job", flush_events=4)
    good = make(tmp_path / "good")
    master = MonitorMaster([bad, good])
    with caplog.at_level(logging.WARNING):
        for step in range(100):
            master.write_events([("loss", 1.0, step)])
    (record,) = caplog.records
    assert "monitor lines failed in write_events (NotADirectoryError" in record.getMessage()
    assert str(tmp_path / "file") in record.getMessage()
    assert master.monitors == [good]
    master.close()
    assert len(read(tmp_path / "good")) == 100
