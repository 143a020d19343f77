"""The CSV monitor: what its files hold, when they are written, and what happens when they cannot
be.
"""

from __future__ import annotations

import csv
import logging
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from ds_monitor_csv.files import UNSAFE, file_stem
from ds_monitor_csv.monitor import CSVMonitor
from ds_testing import MonitorConformance

from ds_core.engine import MonitorMaster
from ds_core.entries import Event

FullAt = Callable[[int], AbstractContextManager[None]]


def read(path: Path) -> list[list[str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


class TestCSVMonitor(MonitorConformance):
    relative_tolerance = 0.0

    def make_monitor(self, tmp_path: Path) -> CSVMonitor:
        return CSVMonitor(tmp_path / "job")

    def read_events(self, tmp_path: Path) -> list[tuple[str, float, int]]:
        found = []
        for path in sorted((tmp_path / "job").glob("*.csv")):
            header, *rows = read(path)
            assert header[0] == "step"
            found += [(path.stem, float(value), int(step)) for step, value in rows]
        return found

    def stored_name(self, name: str) -> str:
        return UNSAFE.sub("_", name)


# -- layout ----------------------------------------------------------------------------------------


def test_the_layout_of_the_documents(tmp_path: Path) -> None:
    monitor = CSVMonitor(tmp_path / "runs" / "job")
    monitor.write_events(
        [Event("Train/Samples/lr", 6e-05, 32), Event("Train/Samples/train_loss", 2.5, 32)]
    )
    monitor.write_events([Event("Train/Samples/lr", 0.00012, 64)])
    monitor.close()
    files = {path.name: path.read_text() for path in (tmp_path / "runs" / "job").iterdir()}
    assert files == {
        "Train_Samples_lr.csv": "step,lr\n32,6e-05\n64,0.00012\n",
        "Train_Samples_train_loss.csv": "step,train_loss\n32,2.5\n",
    }


def test_doubles_are_kept_exactly(tmp_path: Path) -> None:
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0]
    monitor = CSVMonitor(tmp_path)
    monitor.write_events([Event("x", value, i) for i, value in enumerate(values)])
    monitor.close()
    seen = [float(value) for _, value in read(tmp_path / "x.csv")[1:]]
    assert [v.hex() for v in seen] == [v.hex() for v in values]


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "..",
        "",
        "a\0b",
        "new\nline",
        "\udc80",
        "x" * 300,
        "é" * 200,
    ],
)
def test_names_stay_in_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "a" / "b"
    monitor = CSVMonitor(folder)
    monitor.write_events([Event(name, 1.0, 1)])
    monitor.close()
    (path,) = folder.iterdir()
    assert path.suffix == ".csv" or path.name == ".csv"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert read(path)[1:] == [["1", "1.0"]]
    resumed = CSVMonitor(folder)
    resumed.write_events([Event(name, 2.0, 2)])
    resumed.close()
    assert read(path)[1:] == [["1", "1.0"], ["2", "2.0"]]


def test_long_names_that_differ_at_the_end_keep_apart() -> None:
    assert file_stem("x" * 300 + "a") != file_stem("x" * 300 + "b")


def test_names_that_meet_in_one_file_name_keep_apart_also_on_resume(tmp_path: Path) -> None:
    for run, order in enumerate((["a/b", "a_b"], ["a_b", "a/b"])):
        monitor = CSVMonitor(tmp_path)
        for name in order:
            monitor.write_events([Event(name, {"a/b": 1.0, "a_b": 2.0}[name], run)])
            monitor.flush()
        monitor.close()
    files = sorted(tmp_path.iterdir(), key=lambda path: len(path.name))
    assert [read(path) for path in files] == [
        [["step", "b"], ["0", "1.0"], ["1", "1.0"]],
        [["step", "a_b"], ["0", "2.0"], ["1", "2.0"]],
    ]


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "train/=cmd|' C calc'!A0", " =1"])
def test_a_name_is_never_a_formula(tmp_path: Path, name: str) -> None:
    for step in range(2):  # the header of the first run is recognised by the second
        monitor = CSVMonitor(tmp_path)
        monitor.write_events([Event(name, 1.0, step)])
        monitor.close()
    (path,) = tmp_path.iterdir()
    header, *rows = read(path)
    assert header[1] == f"'{name.rsplit('/', 1)[-1]}"
    assert rows == [["0", "1.0"], ["1", "1.0"]]


# -- resuming --------------------------------------------------------------------------------------


def test_resuming_appends_under_one_header(tmp_path: Path) -> None:
    for run in range(3):
        monitor = CSVMonitor(tmp_path)
        monitor.write_events([Event("loss", run + 0.5, run)])
        monitor.close()
    assert (tmp_path / "loss.csv").read_text() == "step,loss\n0,0.5\n1,1.5\n2,2.5\n"


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        ("", ""),
        ("st", ""),
        ("step,loss", ""),
        ("step,loss\n", ""),
        ("step,loss\n1,0.", ""),
        ("step,loss\r\n1,0.5\r\n2", "1,0.5\n"),
        ("step,loss\n1,0.5\n", "1,0.5\n"),
    ],
)
def test_half_a_row_of_a_killed_run_is_cut_off(tmp_path: Path, left: str, kept: str) -> None:
    path = tmp_path / "loss.csv"
    path.write_bytes(left.encode())
    monitor = CSVMonitor(tmp_path)
    monitor.write_events([Event("loss", 2.0, 7)])
    monitor.close()
    assert path.read_text() == f"step,loss\n{kept}7,2.0\n"


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "loss.csv"
    path.write_text("my,notes\n1,2\n3")
    monitor = CSVMonitor(tmp_path)
    monitor.write_events([Event("loss", 2.0, 7)])
    monitor.close()
    assert path.read_text() == "my,notes\n1,2\n3"
    (other,) = set(tmp_path.iterdir()) - {path}
    assert other.read_text() == "step,loss\n7,2.0\n"


def test_two_monitors_of_one_folder_share_the_header(tmp_path: Path) -> None:
    one = CSVMonitor(tmp_path)
    two = CSVMonitor(tmp_path)
    one.write_events([Event("loss", 1.0, 1)])
    two.write_events([Event("loss", 2.0, 2)])
    one.close()
    two.close()
    assert (tmp_path / "loss.csv").read_text() == "step,loss\n1,1.0\n2,2.0\n"


def test_a_file_that_was_removed_is_begun_again(tmp_path: Path) -> None:
    monitor = CSVMonitor(tmp_path / "job")
    monitor.write_events([Event("loss", 1.0, 1)])
    monitor.flush()
    (tmp_path / "job" / "loss.csv").unlink()
    (tmp_path / "job").rmdir()
    monitor.write_events([Event("loss", 2.0, 2)])
    monitor.close()
    assert (tmp_path / "job" / "loss.csv").read_text() == "step,loss\n2,2.0\n"


# -- writing ---------------------------------------------------------------------------------------


def test_more_metrics_than_open_files_are_allowed(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    monitor = CSVMonitor(tmp_path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        monitor.write_events([Event(f"block_{i}", 1.0, 1) for i in range(300)])
        monitor.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list(tmp_path.iterdir())) == 300
    monitor.close()


# -- failing ---------------------------------------------------------------------------------------


def test_a_full_disk_leaves_whole_rows_and_the_rest_waits(tmp_path: Path, full_at: FullAt) -> None:
    monitor = CSVMonitor(tmp_path)
    monitor.write_events([Event("loss", 1.0, 1)])
    monitor.flush()
    path = tmp_path / "loss.csv"
    before = path.read_bytes()
    monitor.write_events([Event("loss", 2.0, 2), Event("loss", 3.0, 3)])
    with full_at(len(before) + 7), pytest.raises(OSError, match="File too large"):
        monitor.flush()
    assert path.read_bytes() == before
    monitor.flush()
    assert path.read_bytes() == before + b"2,2.0\n3,3.0\n"
    monitor.close()


def test_training_goes_on_when_the_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, full_at: FullAt
) -> None:
    monitor = CSVMonitor(tmp_path / "a", flush_events=4)
    other = CSVMonitor(tmp_path / "b")
    master = MonitorMaster([monitor, other])
    with caplog.at_level(logging.WARNING), full_at(80):
        for step in range(100):
            master.write_events([("loss", 0.9**step, step)])
    (record,) = caplog.records
    assert "monitor csv_monitor failed in write_events (OSError" in record.getMessage()
    assert str(tmp_path / "a" / "loss.csv") in record.getMessage()
    assert "switched off and training continues" in record.getMessage()
    assert master.monitors == [other]
    assert [step for step, _ in read(tmp_path / "a" / "loss.csv")] == ["step", "0", "1", "2", "3"]
    master.close()
    assert len(read(tmp_path / "b" / "loss.csv")) == 101


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monitor = CSVMonitor(tmp_path / "file" / "job")
    monitor.write_events([Event("loss", 1.0, 1)])
    with pytest.raises(NotADirectoryError, match=str(tmp_path / "file")):
        monitor.close()
