"""The CSV monitor: takes events, keeps them for a while, and has them written.

Rank 0 only, as every monitor. An OSError (a full disk, a folder that cannot be made) is raised from the call that
had to write; ds_core then switches the monitor off and training goes on.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from ds_core.monitor import Event
from ds_monitor_csv.files import CSVFiles

__all__ = ["CSVMonitor"]

log = logging.getLogger("ds_monitor_csv")

FLUSH_EVENTS = 1000
FLUSH_SECONDS = 10.0


class CSVMonitor:
    """Writes ``<directory>/<name with "/" as "_">.csv``: a header, and a row ``step,value`` per event.

    directory: made when first needed. flush_events, flush_seconds: events are written as soon as so many wait, or
    so long after the last writing. clock: seconds, for tests.
    """

    name = "csv_monitor"

    def __init__(
        self,
        directory: Path,
        *,
        flush_events: int = FLUSH_EVENTS,
        flush_seconds: float = FLUSH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = CSVFiles(directory)
        self._flush_events, self._flush_seconds, self._clock = flush_events, flush_seconds, clock
        self._written_at = clock()
        # For scripts that end without closing the engine.
        self._at_exit = weakref.finalize(self, _write_at_exit, self._files, os.getpid())

    def write_events(self, events: Sequence[Event]) -> None:
        """Take events; values may be anything that is a number, tensors of one element too.

        Raises TypeError for a value that is no number (then nothing of the batch is taken), OSError when writing
        fails, and ValueError after `close`.
        """
        if not self._at_exit.alive:
            raise ValueError(f"the {self.name} of {self._files.directory} is closed")
        self._files.add([_row(*event) for event in events])
        late = self._clock() - self._written_at >= self._flush_seconds
        if self._files.num_rows >= self._flush_events or late:
            self.flush()

    def flush(self) -> None:
        """Write what waits. Raises OSError; what was not written then waits for the next flush."""
        self._files.write()
        self._written_at = self._clock()

    def close(self) -> None:
        """Write what waits and end. Raises OSError, and is closed all the same."""
        if self._at_exit.detach() is not None:
            try:
                self._files.write()
            finally:
                self._files.drop()


def _row(name: str, value: float, step: int) -> tuple[str, int, float]:
    try:
        return str(name), int(step), float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(f"event {name!r}: step {step!r} and value {value!r} must be numbers ({error})") from error


def _write_at_exit(files: CSVFiles, pid: int) -> None:
    if os.getpid() != pid:  # a forked child holds a copy of rows that are its parent's to write
        return
    try:
        files.write()
    except OSError as error:
        log.warning("%d rows below %s were not written: %s", files.num_rows, files.directory, error)
