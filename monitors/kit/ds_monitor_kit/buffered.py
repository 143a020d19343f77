"""What monitors that write files have in common: their section, when they write, and appending
whole or not at all.

A monitor of files brings a `Sink`, which knows what events become and where they go, and a section
built on `JobFolder`; `BufferedMonitor` does the rest. Nothing in the core imports this module
(torch-free).
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path, PureWindowsPath
from typing import Protocol, TypedDict

from pydantic import field_validator

from ds_core.config import Section, option
from ds_core.entries import Event

log = logging.getLogger("ds_monitor_kit")

FLUSH_EVENTS = 1000
FLUSH_SECONDS = 10.0


class JobFolder(Section):
    """A section that says where a monitor writes, and whether.

    Override `enabled` to say what is written.
    """

    writes_outside = ("enabled",)

    enabled: bool = option(False, "Write metrics to files.")
    output_path: str = option(
        "", "Folder to write below; empty: the folder that training was launched in."
    )
    job_name: str = option("DeepSpeedJobName", "Name of this job: a new folder inside output_path.")

    @field_validator("output_path")
    @classmethod
    def _no_nul(cls, value: str) -> str:
        if "\0" in value:
            raise ValueError("a path cannot hold a NUL character")
        return value

    @field_validator("job_name")
    @classmethod
    def _stays_inside(cls, value: str) -> str:
        parts = re.split(r"[/\\]", value)
        if (
            any(part in ("", ".", "..") for part in parts)
            or PureWindowsPath(value).drive
            or "\0" in value
        ):
            raise ValueError(
                "must name a folder inside output_path, such as run1 or team/run1; use output_path "
                "to go elsewhere"
            )
        return value

    def directory(self) -> Path:
        """The absolute folder of the job's files; a later change of the working directory does not
        move it.
        """
        return (Path.cwd() / Path(self.output_path).expanduser() / self.job_name).absolute()


def append_whole(path: Path, block: bytes) -> None:
    """Append all of `block` to the file, or, when that fails, nothing of it.

    Raises OSError, which names the file.
    """
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


class Sink(Protocol):
    """Events on their way to files.

    It holds no reference to its monitor, and makes no file before `write`.
    """

    @property
    def directory(self) -> Path:
        """The folder that it writes below, for messages."""

    @property
    def waiting(self) -> int:
        """How many events wait to be written."""

    def add(self, events: Sequence[Event]) -> None:
        """Take events, all or none of them; names are str, values float, steps int."""

    def write(self) -> None:
        """Write what waits, if anything.

        After an OSError, what could not be written still waits.
        """

    def drop(self) -> None:
        """Forget what waits."""


class Buffering(TypedDict, total=False):
    """The keywords of `BufferedMonitor`, so that a subclass can pass them on: ``**buffering:
    Unpack[Buffering]``.
    """

    flush_events: int
    flush_seconds: float
    clock: Callable[[], float]


class BufferedMonitor:
    """A monitor that keeps events for a while and then has its sink write them.

    Rank 0 only, as every monitor.

    name: as `Monitor.name`.
    flush_events, flush_seconds: events are written as soon as so many wait, or so long after the
        last writing.
    clock: seconds, for tests.

    An OSError (a full disk, a folder that cannot be made) is raised from the call that had to
    write; `MonitorMaster` then switches the monitor off and training goes on.
    """

    def __init__(
        self,
        name: str,
        sink: Sink,
        *,
        flush_events: int = FLUSH_EVENTS,
        flush_seconds: float = FLUSH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._sink = sink
        self._flush_events = flush_events
        self._flush_seconds = flush_seconds
        self._clock = clock
        self._written_at = clock()
        # For scripts that end without closing the engine.
        self._at_exit = weakref.finalize(self, _write_at_exit, name, sink, os.getpid())

    def write_events(self, events: Sequence[Event]) -> None:
        """Take events; values may be anything that is a number, tensors of one element too.

        Raises TypeError for a value that is no number (then nothing of the batch is taken), OSError
        when writing fails, and ValueError after `close`.
        """
        if not self._at_exit.alive:
            raise ValueError(f"the monitor {self.name} of {self._sink.directory} is closed")
        self._sink.add([_in_numbers(*event) for event in events])
        late = self._clock() - self._written_at >= self._flush_seconds
        if self._sink.waiting >= self._flush_events or late:
            self.flush()

    def flush(self) -> None:
        """Write what waits. Raises OSError; what was not written then waits for the next flush."""
        self._sink.write()
        self._written_at = self._clock()

    def close(self) -> None:
        """Write what waits and end. Raises OSError, and is closed all the same."""
        if self._at_exit.detach() is not None:
            try:
                self._sink.write()
            finally:
                self._sink.drop()


def _in_numbers(name: str, value: float, step: int) -> Event:
    try:
        return Event(str(name), float(value), int(step))
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(
            f"event {name!r}: step {step!r} and value {value!r} must be numbers ({error})"
        ) from error


def _write_at_exit(name: str, sink: Sink, pid: int) -> None:
    if os.getpid() != pid:  # a forked child holds a copy of events that are its parent's to write
        return
    try:
        sink.write()
    except OSError as error:
        log.warning(
            "monitor %s: %d events below %s were not written: %s",
            name,
            sink.waiting,
            sink.directory,
            error,
        )
