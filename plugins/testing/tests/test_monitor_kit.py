"""`MonitorConformance` passes a simple good monitor, and finds each fault in a bad one."""

from __future__ import annotations

import json
import math
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

import pytest
from ds_testing.kits.tools.monitor import MonitorConformance, Row

from ds_core.entries import Event


class LinesMonitor:
    """One JSON line per event, buffered until `flush`."""

    name = "lines"

    def __init__(self, folder: Path) -> None:
        self.file = folder / "events.jsonl"
        self.lines: list[str] = []

    def write_events(self, events: Sequence[Event]) -> None:
        self.lines += [json.dumps(list(event)) for event in events]

    def flush(self) -> None:
        with self.file.open("a", encoding="utf-8") as out:
            out.writelines(line + "\n" for line in self.lines)
        self.lines.clear()

    def close(self) -> None:
        self.flush()


class TestLinesMonitor(MonitorConformance):
    monitor: type[LinesMonitor] = LinesMonitor

    def make_monitor(self, tmp_path: Path) -> LinesMonitor:
        return self.monitor(tmp_path)

    def read_events(self, tmp_path: Path) -> list[Row]:
        file = tmp_path / "events.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [(name, value, step) for name, value, step in map(json.loads, lines)]


class FilesMonitor(LinesMonitor):
    """One file per name, and float32-like rounding: the freedoms that the kit gives."""

    def flush(self) -> None:
        for line in self.lines:
            name, value, step = json.loads(line)
            with (self.file.parent / urllib.parse.quote(name, safe="")).open("a") as out:
                out.write(f"{value:.8g} {step}\n")
        self.lines.clear()


class TestFilesMonitor(MonitorConformance):
    def make_monitor(self, tmp_path: Path) -> FilesMonitor:
        return FilesMonitor(tmp_path)

    def read_events(self, tmp_path: Path) -> list[Row]:
        rows = []
        for file in sorted(tmp_path.iterdir()):
            for line in file.read_text().splitlines():
                value, step = line.split()
                rows.append((file.name, float(value), int(step)))
        return rows

    def stored_name(self, name: str) -> str:
        return urllib.parse.quote(name, safe="")


class Nameless(LinesMonitor):
    name = ""


class FlushesOnlyAtClose(LinesMonitor):
    def flush(self) -> None:
        pass

    def close(self) -> None:
        super().flush()


class ForgetsAtClose(LinesMonitor):
    def close(self) -> None:
        pass


class RepeatsAtFlush(LinesMonitor):
    def flush(self) -> None:
        keep = list(self.lines)
        super().flush()
        self.lines = keep


class WritesThroughAndAgain(LinesMonitor):
    def write_events(self, events: Sequence[Event]) -> None:
        super().write_events(events)
        super().flush()
        super().write_events(events)


class Reverses(LinesMonitor):
    def write_events(self, events: Sequence[Event]) -> None:
        super().write_events(events[::-1])


class Loses(LinesMonitor):
    def write_events(self, events: Sequence[Event]) -> None:
        super().write_events(events[:99])


class ChokesOnNan(LinesMonitor):
    def write_events(self, events: Sequence[Event]) -> None:
        self.lines += [json.dumps(list(event), allow_nan=False) for event in events]


class TurnsNanToInf(LinesMonitor):
    def write_events(self, events: Sequence[Event]) -> None:
        super().write_events(
            [e._replace(value=math.inf) if math.isnan(e.value) else e for e in events]
        )


class FoldsNames(LinesMonitor):
    def write_events(self, events: Sequence[Event]) -> None:
        super().write_events([e._replace(name=e.name.replace("/", ".")) for e in events])


class WrapsSteps(LinesMonitor):
    def write_events(self, events: Sequence[Event]) -> None:
        super().write_events([e._replace(step=e.step % 2**31) for e in events])


class Escapes(FilesMonitor):
    def flush(self) -> None:
        for line in self.lines:
            (self.file.parent / json.loads(line)[0]).write_text("")


class RaisesAtSecondClose(LinesMonitor):
    closed = False

    def close(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        self.closed = True
        super().close()


@pytest.mark.parametrize(
    "monitor, method",
    [
        (Nameless, "test_is_a_monitor"),
        (FlushesOnlyAtClose, "test_flush_makes_events_readable"),
        (ForgetsAtClose, "test_close_flushes"),
        (RepeatsAtFlush, "test_flush_twice_is_harmless"),
        (WritesThroughAndAgain, "test_unflushed_events_are_a_beginning"),
        (Reverses, "test_order_is_kept"),
        (Loses, "test_many_events"),
        (ChokesOnNan, "test_values_that_are_not_finite"),
        (TurnsNanToInf, "test_values_that_are_not_finite"),
        (FoldsNames, "test_odd_names"),
        (WrapsSteps, "test_extreme_values_and_steps"),
        (Escapes, "test_written_below_the_given_directory"),
        (RepeatsAtFlush, "test_close_twice_is_harmless"),
        (RaisesAtSecondClose, "test_close_twice_is_harmless"),
    ],
)
def test_kit_finds_the_fault(monitor: type[LinesMonitor], method: str, tmp_path: Path) -> None:
    kit = TestLinesMonitor()
    kit.monitor = monitor
    with pytest.raises((AssertionError, ValueError)):
        getattr(kit, method)(tmp_path)
