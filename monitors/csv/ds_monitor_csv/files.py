"""The files of a CSV monitor: what they are called, and appending whole rows to them.

[Note: opened per flush] Rows wait in memory and each flush opens, appends and closes. Training may
log thousands of metrics, and a file kept open for each would use up the process's descriptors; once
per flush costs little.
"""

from __future__ import annotations

import csv
import io
import re
import zlib
from collections.abc import Sequence
from pathlib import Path

from ds_monitor_kit import append_whole

from ds_core.entries import Event

UNSAFE = re.compile("[/\\\\\x00-\x1f\x7f\ud800-\udfff]")
"""Separators, control characters and halves of surrogate pairs: none of them may reach a file name.
"""
FORMULA = ("=", "+", "-", "@")
MAX_STEM_BYTES = 200
LONGEST_LINE = 65536


def file_stem(name: str) -> str:
    """The file name of metric `name` without ``.csv``: slashes become underscores, and very long
    names are cut.
    """
    stem = UNSAFE.sub("_", name) or "_"
    encoded = stem.encode()
    if len(encoded) <= MAX_STEM_BYTES:
        return stem
    return f"{encoded[:MAX_STEM_BYTES].decode(errors='ignore')}-{_digest(name)}"


def header(name: str) -> bytes:
    """The first line of the file of metric `name`: ``step,`` and the last part of the name.

    A name that a spreadsheet would take for a formula gets an apostrophe in front.
    """
    text = io.StringIO()
    cell = UNSAFE.sub("_", name.rsplit("/", 1)[-1])
    if cell.lstrip().startswith(FORMULA):
        cell = f"'{cell}"
    csv.writer(text, lineterminator="\n").writerow(["step", cell])
    return text.getvalue().encode()


class CSVFiles:
    """Rows waiting to be written, by metric, and the files below `directory` that they go to."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.waiting = 0
        self._rows: dict[str, list[str]] = {}
        self._paths: dict[str, Path] = {}

    def add(self, events: Sequence[Event]) -> None:
        """Take events, a row each."""
        for name, value, step in events:
            self._rows.setdefault(name, []).append(f"{step},{value!r}\n")
        self.waiting += len(events)

    def write(self) -> None:
        """Append what waits to the files.

        After an OSError, what could not be written still waits.
        """
        for name in list(self._rows):
            path = self._paths.get(name)
            block = "".join(self._rows[name]).encode()
            # The first rows of this metric, or its file was removed meanwhile.
            if path is None or not path.exists():
                path, is_new = self._claim(name)
                block = header(name) + block if is_new else block
            append_whole(path, block)
            self._paths[name] = path
            self.waiting -= len(self._rows.pop(name))

    def drop(self) -> None:
        """Forget what waits."""
        self._rows.clear()
        self.waiting = 0

    def _claim(self, name: str) -> tuple[Path, bool]:
        """The file for `name`, and whether it needs its header.

        Two names can lead to one file name (``a/b`` and ``a_b``). The second gets a suffix made
        from its name; so it does in a resumed run, since a file whose header is another metric's is
        not ours to append to.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        stem = file_stem(name)
        taken = {path for other, path in self._paths.items() if other != name}
        for path in (
            self.directory / f"{stem}.csv",
            self.directory / f"{stem}-{_digest(name)}.csv",
        ):
            # A file is this metric's when its header is.
            size = _usable_size(path, header(name))
            if path not in taken and size is not None:
                return path, size == 0
        raise FileExistsError(
            f"{self.directory / stem}.csv holds another metric than {name!r}; move it away"
        )


def _usable_size(path: Path, first_line: bytes) -> int | None:
    """How many bytes the file keeps when the metric with that header goes on in it; None when it is
    another's.

    An earlier run that was killed, or whose disk was full, may have left half a row at the end; it
    is cut off.
    """
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        found = file.readline(LONGEST_LINE)
        # A run that was killed may have left half a header.
        if not found.endswith(b"\n"):
            size = 0 if first_line.startswith(found) else None
        else:
            size = _end_of_rows(file) if found.rstrip(b"\r\n") == first_line.rstrip(b"\n") else None
        if size is not None:
            file.truncate(size)
        return size


def _end_of_rows(file: io.BufferedRandom) -> int | None:
    """The size up to and with the last line end; None when the last line is too long to be a
    row."""
    size = file.seek(0, io.SEEK_END)
    start = file.seek(max(0, size - LONGEST_LINE))
    last = file.read().rfind(b"\n")
    return start + last + 1 if last >= 0 else None


def _digest(name: str) -> str:
    return f"{zlib.crc32(name.encode(errors='surrogatepass')):08x}"
