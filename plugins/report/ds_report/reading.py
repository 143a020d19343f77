"""Reading the record of a run: what `ds_report.recorder` wrote, perhaps while it is still being
written.

Nothing in a record is trusted: a line that is torn, or is no object, is left out, and what has the
wrong type counts as missing.
"""

from __future__ import annotations

import bisect
import json
import math
import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_report.recorder import FORMAT, NOW_BYTES

LONGEST_LINE = 4 * 1024 * 1024
LARGEST = 1e100
"""Numbers of a record beyond it count as infinite."""
TAIL = 4 * 1024 * 1024
"""Of ranks other than the first, step lines are read from this many last bytes alone."""


@dataclass(slots=True)
class Columns:
    """The steps of one rank as columns of equal length; a value that is missing is NaN.

    Steps grow: where a run went back (it was resumed from a checkpoint), what came after that step
    is replaced.
    """

    step: array[int] = field(default_factory=lambda: array("q"))
    time: array[float] = field(default_factory=lambda: array("d"))
    values: dict[str, array[float]] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    """Where in the columns each start of the run begins."""

    def add(self, step: int, time: float, values: Mapping[str, float]) -> None:
        """One row."""
        if self.step and step <= self.step[-1]:
            self.cut(bisect.bisect_left(self.step, step))
        size = len(self.step)
        self.step.append(step)
        self.time.append(time)
        for name, value in values.items():
            column = self.values.get(name)
            if column is None:
                column = self.values[name] = array("d", [math.nan]) * size
            elif len(column) < size:
                column.extend([math.nan] * (size - len(column)))
            column.append(value)

    def cut(self, size: int) -> None:
        """Drop all rows from `size` on."""
        del self.step[size:], self.time[size:]
        for column in self.values.values():
            del column[size:]
        self.starts = [min(start, size) for start in self.starts]

    def keep_last(self, size: int) -> None:
        """Drop all rows but the last `size`, when there are twice as many."""
        if (extra := len(self.step) - size) > size:
            for name in self.values:
                del self.column(name)[:extra]
            del self.step[:extra], self.time[:extra]
            self.starts = [start - extra for start in self.starts if start >= extra]

    def column(self, name: str) -> array[float]:
        """The values of a metric, one for each step."""
        column = self.values.get(name, array("d"))
        column.extend([math.nan] * (len(self.step) - len(column)))
        return column


@dataclass(slots=True)
class RankRecord:
    """What one rank wrote.

    starts: the lines ``start``.
    last: "running", or how it ended, and `error` why.

    memory: (step, bytes in use, bytes at peak).
    events: the lines of other kinds.
    bad: how many lines were unreadable.
    """

    rank: int
    path: Path
    columns: Columns = field(default_factory=Columns)
    starts: list[dict[str, Any]] = field(default_factory=list)
    memory: list[tuple[int, float, float]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    last: str = "running"
    error: str = ""
    ended: float = math.nan
    bad: int = 0


def rank_files(folder: Path) -> dict[int, Path]:
    """Rank -> its file, in order; empty where there is no record."""
    found = {}
    if folder.is_dir():
        for path in folder.iterdir():
            # A FIFO in the place of a file would be waited for.
            if (match := re.fullmatch(r"rank([0-9]{1,7})\.jsonl", path.name)) and path.is_file():
                found[int(match[1])] = path
    return dict(sorted(found.items()))


def read_rank(rank: int, path: Path) -> RankRecord:
    """One rank's file.

    Of ranks other than 0 most step lines of a long file are passed over. Raises OSError.
    """
    record = RankRecord(rank, path)
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        skip_until = size - TAIL if rank else 0
        at = 0
        while line := file.readline(LONGEST_LINE):
            at += len(line)
            if at < skip_until and line.startswith(b'{"kind": "step"'):
                continue
            take(record, line)
    return record


def take(record: RankRecord, line: bytes) -> None:
    """Add one line to the record."""
    if not line.strip():
        return
    try:
        row = json.loads(line)
    # torn: it was being written, or the run was killed; or it is of no recorder
    except (ValueError, RecursionError):
        record.bad += 1
        return
    row = row if isinstance(row, dict) else {}
    kind = row.get("kind")
    time = number(row.get("time"))
    step = at if type(at := row.get("step")) is int and 0 <= at < 2**62 else None
    if kind == "step" and step is not None:
        values = {}
        for prefix, group in (("", row.get("metrics")), ("host_ms/", row.get("host_ms"))):
            for name, value in group.items() if isinstance(group, dict) else ():
                values[prefix + name] = number(value)
        record.columns.add(step, time, values)
    elif kind == "memory" and step is not None:
        while record.memory and record.memory[-1][0] > step:
            record.memory.pop()
        record.memory.append((step, number(row.get("allocated")), number(row.get("peak"))))
    elif kind == "start" and row.get("format") == FORMAT:
        record.starts.append(row)
        record.columns.starts.append(len(record.columns.step))
        record.last = "running"
        record.error = ""
        record.ended = math.nan
    elif kind == "end":
        record.last = str(row.get("state"))
        record.error = str(row.get("error") or "")
        record.ended = time
    elif isinstance(kind, str):
        record.events.append(row)
    else:
        record.bad += 1


def number(value: Any) -> float:
    """`value` as a float; NaN for what is no number. "Infinity" and "-Infinity" are numbers."""
    if isinstance(value, (int, float)):
        try:
            return bounded(float(value))
        except OverflowError:
            return math.nan
    return (
        {"Infinity": math.inf, "-Infinity": -math.inf}.get(value, math.nan)
        if isinstance(value, str)
        else math.nan
    )


def bounded(value: float) -> float:
    """`value`, or an infinity for what is so large that sums and differences of such numbers are
    none.
    """
    return value if not abs(value) > LARGEST else math.copysign(math.inf, value)


def read_now(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank is doing; empty when it does not say, or when the file is being written just
    now."""
    try:
        path = folder / f"rank{rank}.now"
        if not path.is_file():
            return {}
        with path.open("rb") as file:
            row = json.loads(file.read(NOW_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return row if isinstance(row, dict) else {}
