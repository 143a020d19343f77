"""The TensorBoard monitor: an `EventFile` behind the core's buffering."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_monitor_kit import BufferedMonitor, Buffering, append_whole
from tensorboard.compat.proto import event_pb2, summary_pb2

from ds_core.entries import Event
from ds_monitor_tensorboard.records import record

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ds_monitor_tensorboard.config import TensorBoardConfig

FILE_VERSION = "brain.Event:2"


class TensorBoardMonitor(BufferedMonitor):
    """Writes scalars to one new event file in `directory` per monitor, under the events' own names,
    as float32.

    directory: made when first needed. flush_events, flush_seconds, clock: see `BufferedMonitor`.
    """

    def __init__(self, directory: Path, **buffering: Unpack[Buffering]) -> None:
        super().__init__("tensorboard", EventFile(directory), **buffering)


def open_monitor(section: TensorBoardConfig, config: Mapping[str, Any]) -> TensorBoardMonitor:
    """The monitor of `section`; event files have no place for the run's config."""
    return TensorBoardMonitor(section.directory())


class EventFile:
    """Records waiting to be written, and the file in `directory` that they go to; it is made by the
    first `write`.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.waiting = 0
        self._path: Path | None = None
        self._records = bytearray()

    def add(self, events: Sequence[Event]) -> None:
        """Take events, all stamped with the time of this call."""
        now = time.time()
        self._records += b"".join([record(_encode(event, now)) for event in events])
        self.waiting += len(events)

    def write(self) -> None:
        """Append what waits, whole or not at all. Raises OSError, and then it still waits."""
        if not self._records:
            return
        if self._path is None:
            self._path = _new_file(self.directory)
            self._records[:0] = record(
                event_pb2.Event(
                    wall_time=time.time(), file_version=FILE_VERSION
                ).SerializeToString()
            )
        append_whole(self._path, bytes(self._records))
        self.drop()

    def drop(self) -> None:
        """Forget what waits."""
        self._records.clear()
        self.waiting = 0


def _encode(event: Event, now: float) -> bytes:
    """One scalar as the message that TensorBoard reads."""
    # a message holds no halves of surrogate pairs
    tag = event.name.encode(errors="replace").decode()
    summary = summary_pb2.Summary(
        value=[summary_pb2.Summary.Value(tag=tag, simple_value=event.value)]
    )
    encoded: bytes = event_pb2.Event(
        wall_time=now, step=event.step, summary=summary
    ).SerializeToString()
    return encoded


def _new_file(directory: Path) -> Path:
    """A new, empty event file whose name sorts by time, as TensorBoard expects."""
    directory.mkdir(parents=True, exist_ok=True)
    now = int(time.time())
    host = socket.gethostname().replace(os.sep, "_")
    index = 0
    while True:
        path = directory / f"events.out.tfevents.{now:010d}.{host}.{os.getpid()}.{index}"
        try:
            path.touch(exist_ok=False)
            return path
        except FileExistsError:  # another monitor of this process and second
            index += 1
