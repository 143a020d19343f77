"""The TensorBoard monitor: takes events, keeps them for a while, and appends them to an event file.

Rank 0 only, as every monitor. An OSError (a full disk, a folder that cannot be made) is raised from the call that
had to write; ds_core then switches the monitor off and training goes on.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from tensorboard.compat.proto import event_pb2, summary_pb2

from ds_core.monitor import Event
from ds_monitor_tensorboard.records import record

__all__ = ["EventFile", "TensorBoardMonitor"]

log = logging.getLogger("ds_monitor_tensorboard")

FLUSH_EVENTS = 1000
FLUSH_SECONDS = 10.0
FILE_VERSION = "brain.Event:2"


class EventFile:
    """Records waiting to be written, and the file in `directory` that they go to; it is made by the first `write`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.num_records = 0
        self._path: Path | None = None
        self._waiting = bytearray()

    def add(self, events: Sequence[bytes]) -> None:
        """Take encoded events."""
        self._waiting += b"".join(map(record, events))
        self.num_records += len(events)

    def write(self) -> None:
        """Append what waits, whole or not at all. Raises OSError, and then it still waits."""
        if not self._waiting:
            return
        if self._path is None:
            self._path = _new_file(self.directory)
            self._waiting[:0] = record(
                event_pb2.Event(wall_time=time.time(), file_version=FILE_VERSION).SerializeToString()
            )
        _append(self._path, bytes(self._waiting))
        self.drop()

    def drop(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        self.num_records = 0


class TensorBoardMonitor:
    """Writes scalars to one new event file in `directory` per monitor, under the events' own names.

    directory: made when first needed. flush_events, flush_seconds: events are written as soon as so many wait, or
    so long after the last writing. clock: seconds, for tests.
    """

    name = "tensorboard"

    def __init__(
        self,
        directory: Path,
        *,
        flush_events: int = FLUSH_EVENTS,
        flush_seconds: float = FLUSH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = EventFile(directory)
        self._flush_events, self._flush_seconds, self._clock = flush_events, flush_seconds, clock
        self._written_at = clock()
        # For scripts that end without closing the engine.
        self._at_exit = weakref.finalize(self, _write_at_exit, self._file, os.getpid())

    def write_events(self, events: Sequence[Event]) -> None:
        """Take events; values may be anything that is a number, tensors of one element too. Kept as float32.

        Raises TypeError for a value that is no number (then nothing of the batch is taken), OSError when writing
        fails, and ValueError after `close`.
        """
        if not self._at_exit.alive:
            raise ValueError(f"the {self.name} monitor of {self._file.directory} is closed")
        now = time.time()
        self._file.add([_encode(*event, now) for event in events])
        late = self._clock() - self._written_at >= self._flush_seconds
        if self._file.num_records >= self._flush_events or late:
            self.flush()

    def flush(self) -> None:
        """Write what waits. Raises OSError; it then waits for the next flush."""
        self._file.write()
        self._written_at = self._clock()

    def close(self) -> None:
        """Write what waits and end. Raises OSError, and is closed all the same."""
        if self._at_exit.detach() is not None:
            try:
                self._file.write()
            finally:
                self._file.drop()


def _encode(name: str, value: float, step: int, now: float) -> bytes:
    """One scalar as the message that TensorBoard reads."""
    try:
        number, at = float(value), int(step)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(f"event {name!r}: step {step!r} and value {value!r} must be numbers ({error})") from error
    tag = str(name).encode(errors="replace").decode()  # a message holds no halves of surrogate pairs
    scalar = summary_pb2.Summary.Value(tag=tag, simple_value=number)
    encoded: bytes = event_pb2.Event(
        wall_time=now, step=at, summary=summary_pb2.Summary(value=[scalar])
    ).SerializeToString()
    return encoded


def _new_file(directory: Path) -> Path:
    """A new, empty event file whose name sorts by time, as TensorBoard expects."""
    directory.mkdir(parents=True, exist_ok=True)
    now, host = int(time.time()), socket.gethostname().replace(os.sep, "_")
    index = 0
    while True:
        path = directory / f"events.out.tfevents.{now:010d}.{host}.{os.getpid()}.{index}"
        try:
            path.touch(exist_ok=False)
            return path
        except FileExistsError:  # another monitor of this process and second
            index += 1


def _append(path: Path, block: bytes) -> None:
    """Append all of `block` to the file, or, when that fails, nothing of it."""
    with path.open("ab", buffering=0) as file:
        start = file.seek(0, io.SEEK_END)
        rest = memoryview(block)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                file.truncate(start)
            raise OSError(error.errno, error.strerror, str(path)) from error


def _write_at_exit(file: EventFile, pid: int) -> None:
    if os.getpid() != pid:  # a forked child holds a copy of events that are its parent's to write
        return
    try:
        file.write()
    except OSError as error:
        log.warning("%d events for %s were not written: %s", file.num_records, file.directory, error)
