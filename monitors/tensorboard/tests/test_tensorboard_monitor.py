"""The TensorBoard monitor, read back with TensorBoard's own reader."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from ds_monitor_tensorboard import records
from ds_monitor_tensorboard.monitor import TensorBoardMonitor
from ds_testing import MonitorConformance
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event as Message
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from ds_core.engine import MonitorMaster
from ds_core.entries import Event

Row = tuple[str, float, int]
FullAt = Callable[[int], AbstractContextManager[None]]


def read(directory: Path) -> list[Row]:
    """Every scalar below `directory`, through TensorBoard's reader, which checks each record's
    checksums.
    """
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return [(tag, e.value, e.step) for tag in reader.Tags()["scalars"] for e in reader.Scalars(tag)]


class TestTensorBoardMonitor(MonitorConformance):
    def make_monitor(self, tmp_path: Path) -> TensorBoardMonitor:
        return TensorBoardMonitor(tmp_path / "job")

    def read_events(self, tmp_path: Path) -> list[Row]:
        return read(tmp_path / "job") if (tmp_path / "job").exists() else []


# -- the file --------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"\0", b"123456789", bytes(range(256)) * 3])
def test_checksums_are_tensorboards(data: bytes) -> None:
    assert records.masked_crc32c(data) == masked_crc32c(data)


def test_the_checksum_of_the_standard() -> None:
    # the check value that CRC-32C is published with
    assert records.crc32c(b"123456789") == 0xE3069283


def test_the_file_begins_with_its_version(tmp_path: Path) -> None:
    monitor = TensorBoardMonitor(tmp_path)
    monitor.write_events([Event("loss", 1.0, 1)])
    monitor.close()
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    first = Message.FromString(data[12 : 12 + int.from_bytes(data[:8], "little")])
    assert first.file_version == "brain.Event:2"
    assert first.wall_time > 0


def test_runs_in_one_folder_are_joined(tmp_path: Path) -> None:
    for run in range(3):
        monitor = TensorBoardMonitor(tmp_path)
        monitor.write_events([Event("loss", float(run), run)])
        monitor.close()
    assert len(list(tmp_path.iterdir())) == 3
    assert read(tmp_path) == [("loss", 0.0, 0), ("loss", 1.0, 1), ("loss", 2.0, 2)]


def test_two_monitors_of_one_process_do_not_share_a_file(tmp_path: Path) -> None:
    one = TensorBoardMonitor(tmp_path)
    two = TensorBoardMonitor(tmp_path)
    for step in range(3):
        one.write_events([Event("one", 1.0, step)])
        two.write_events([Event("two", 2.0, step)])
        one.flush()
        two.flush()
    one.close()
    two.close()
    assert sorted(read(tmp_path)) == [
        (n, v, s) for n, v in (("one", 1.0), ("two", 2.0)) for s in range(3)
    ]


def test_values_are_kept_as_float32(tmp_path: Path) -> None:
    monitor = TensorBoardMonitor(tmp_path)
    monitor.write_events(
        [Event("x", value, i) for i, value in enumerate([16777217.0, -1e-46, 1e300])]
    )
    monitor.close()
    assert read(tmp_path) == [("x", 16777216.0, 0), ("x", 0.0, 1), ("x", float("inf"), 2)]


def test_a_name_that_is_no_text_does_no_harm(tmp_path: Path) -> None:
    monitor = TensorBoardMonitor(tmp_path)
    monitor.write_events([Event("\udc80", 1.0, 1), Event("", 2.0, 1)])
    monitor.close()
    assert sorted(read(tmp_path)) == [("", 2.0, 1), ("?", 1.0, 1)]


# -- writing ---------------------------------------------------------------------------------------


def test_it_starts_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    monitor = TensorBoardMonitor(tmp_path)
    monitor.write_events([Event("loss", 1.0, 1)])
    monitor.flush()
    assert threading.active_count() == before
    monitor.close()


SCRIPT = """
import sys
from pathlib import Path
from ds_core.entries import Event
from ds_monitor_tensorboard.monitor import TensorBoardMonitor
monitor = TensorBoardMonitor(Path(sys.argv[1]))
monitor.write_events([Event("loss", 1.0, 1)])
assert "torch" not in sys.modules
"""


def test_a_script_that_ends_without_closing_loses_nothing_and_needs_no_torch(
    tmp_path: Path,
) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list(tmp_path.iterdir())) == 1
    assert read(tmp_path) == [("loss", 1.0, 1)]


# -- failing ---------------------------------------------------------------------------------------


def test_a_full_disk_leaves_whole_records_and_the_rest_waits(
    tmp_path: Path, full_at: FullAt
) -> None:
    monitor = TensorBoardMonitor(tmp_path)
    monitor.write_events([Event("loss", 1.0, 1)])
    with full_at(10), pytest.raises(OSError, match="File too large"):
        monitor.flush()
    (path,) = tmp_path.iterdir()
    assert path.read_bytes() == b""
    monitor.flush()
    before = path.read_bytes()
    monitor.write_events([Event("loss", 2.0, 2), Event("loss", 3.0, 3)])
    with full_at(len(before) + 7), pytest.raises(OSError, match="File too large"):
        monitor.flush()
    assert path.read_bytes() == before
    monitor.close()
    assert list(tmp_path.iterdir()) == [path]
    assert read(tmp_path) == [("loss", 1.0, 1), ("loss", 2.0, 2), ("loss", 3.0, 3)]


def test_training_goes_on_when_the_disk_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, full_at: FullAt
) -> None:
    monitor = TensorBoardMonitor(tmp_path / "a", flush_events=4)
    other = TensorBoardMonitor(tmp_path / "b")
    master = MonitorMaster([monitor, other])
    with caplog.at_level(logging.WARNING), full_at(400):
        for step in range(100):
            master.write_events([("loss", 0.9**step, step)])
    (record,) = caplog.records
    assert "monitor tensorboard failed in write_events (OSError" in record.getMessage()
    assert str(tmp_path / "a") in record.getMessage()
    assert "switched off and training continues" in record.getMessage()
    assert master.monitors == [other]
    seen = read(tmp_path / "a")
    assert 4 <= len(seen) < 12
    assert [step for _, _, step in seen] == list(range(len(seen)))
    master.close()
    assert len(read(tmp_path / "b")) == 100


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monitor = TensorBoardMonitor(tmp_path / "file" / "job")
    monitor.write_events([Event("loss", 1.0, 1)])
    with pytest.raises(NotADirectoryError, match=str(tmp_path / "file")):
        monitor.close()
