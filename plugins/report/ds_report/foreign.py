"""Runs without a record of ours: folders of ``csv_monitor``, and of TensorBoard, read without its
packages.

Both count samples on the x axis; event files of other programs count what these programs count.
"""

from __future__ import annotations

import csv
import math
import struct
from array import array
from collections.abc import Iterator
from pathlib import Path

from ds_report.reading import Columns, bounded

Series = dict[str, Columns]
"""Metric -> its points: `step` is x, and the only column is called "y"."""
LONGEST_RECORD = 64 * 1024 * 1024


def csv_files(folder: Path) -> list[Path]:
    """The files of a CSV monitor in `folder`: their first line is ``step,<metric>``."""
    return [
        path for path in sorted(folder.glob("*.csv")) if path.is_file() and _heads_a_metric(path)
    ]


def _heads_a_metric(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.readline(65536)
    return head.startswith(b"step,") and head.endswith(b"\n")


def read_csv(folder: Path) -> Series:
    """Metric -> its points. Rows that are torn are left out. Raises OSError."""
    found = {}
    for path in csv_files(folder):
        points = found[path.stem.replace("Train_Samples_", "Train/Samples/", 1)] = Columns()
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            for row in csv.reader(
                line for line in file if line.endswith("\n") and "\0" not in line
            ):
                try:
                    x, y = row
                    points.add(int(float(x)), math.nan, {"y": bounded(float(y))})
                except (ValueError, OverflowError):  # the first line, or half a row
                    continue
    return found


def event_files(folder: Path) -> list[Path]:
    """The event files of TensorBoard in `folder`, oldest first."""
    return sorted(path for path in folder.glob("*tfevents*") if path.is_file())


def read_events(folder: Path) -> Series:
    """Tag -> its points.

    What is not a scalar is left out, and a file ends where it is torn. Raises OSError.
    """
    found: Series = {}
    for path in event_files(folder):
        for record in _records(path):
            try:
                time, step, values = _event(record)
            except (ValueError, IndexError, struct.error, UnicodeDecodeError):
                continue
            for tag, value in values:
                found.setdefault(tag, Columns()).add(step, time, {"y": bounded(value)})
    return found


def _records(path: Path) -> Iterator[bytes]:
    """The records of a TFRecord file: length, its checksum, data, its checksum.

    Checksums are not read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        while len(head := file.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            if length > min(size, LONGEST_RECORD):
                return
            data = file.read(length)
            if len(data) < length:
                return
            file.read(4)
            yield data


# -- protobuf, as far as scalars need it -----------------------------------------------------------


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field: an int, or the bytes of anything longer.

    Raises ValueError or IndexError.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        value: int | bytes
        if kind == 0:
            value, at = _varint(data, at)
        else:
            if kind == 2:
                size, at = _varint(data, at)
            elif kind in (1, 5):
                size = 8 if kind == 1 else 4
            else:
                raise ValueError("a field of an old kind")
            value = data[at : at + size]
            at += size
            if len(value) < size:
                raise ValueError("a field is cut off")
        yield key >> 3, value


def _event(data: bytes) -> tuple[float, int, list[tuple[str, float]]]:
    """(time, step, scalars) of one event."""
    time = math.nan
    step = 0
    values = []
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            (time,) = struct.unpack("<d", value)
        elif number == 2 and isinstance(value, int):
            step = value if value < 2**63 else value - 2**64
        elif number == 5 and isinstance(value, bytes):
            values += [
                scalar
                for n, v in _fields(value)
                if n == 1 and isinstance(v, bytes) and (scalar := _scalar(v))
            ]
    return time, step, values


def _scalar(data: bytes) -> tuple[str, float] | None:
    """(tag, value) of one value of a summary; None when it is no scalar."""
    tag = ""
    found = None
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode()
        elif number == 2 and isinstance(value, bytes):
            (found,) = struct.unpack("<f", value)
        elif number == 8 and isinstance(value, bytes):
            found = _tensor(value)
    return (tag, found) if tag and found is not None else None


def _tensor(data: bytes) -> float | None:
    """The number in a tensor of one float or double, as TensorFlow 2 and torch's newer writers
    store scalars.
    """
    fields = dict(_fields(data))
    code = {1: "f", 2: "d"}.get(kind) if isinstance(kind := fields.get(1), int) else None
    raw = fields.get(4) or fields.get({"f": 5, "d": 6}.get(code or "", 0))
    if code is None or not isinstance(raw, bytes) or len(raw) != array(code).itemsize:
        return None
    found: float = struct.unpack(f"<{code}", raw)[0]
    return found
