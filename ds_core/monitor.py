"""The monitor contract, and the fan-out that keeps a failing monitor from hurting training.

Only rank 0 holds monitors. A monitor that raises is closed and switched off after one warning; the others and
training go on.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from ds_core.context import StashKey
from ds_core.entries import Event

__all__ = ["MONITOR", "Event", "Monitor", "MonitorMaster"]

log = logging.getLogger("ds_core.monitor")


@runtime_checkable
class Monitor(Protocol):
    """Receives metric events on rank 0. Buffer writes; `flush` makes them readable; `close` flushes and frees."""

    name: str

    def write_events(self, events: Sequence[Event]) -> None:
        """Take `events` in order; called at most once per optimizer step, and by users."""

    def flush(self) -> None:
        """Make everything written so far readable by others."""

    def close(self) -> None:
        """Flush and release; nothing is called afterwards."""


class MonitorMaster:
    """Fans events out to every enabled monitor; `write_events` is public, for users' own metrics.

    On ranks other than 0 it holds no monitors and every call does nothing.
    """

    def __init__(self, monitors: Iterable[Monitor] = ()) -> None:
        self.monitors = list(monitors)

    @property
    def enabled(self) -> bool:
        """Whether anybody listens; building events is skipped otherwise."""
        return bool(self.monitors)

    def write_events(self, events: Iterable[tuple[str, float, int]]) -> None:
        """Send ``(name, value, step)`` triples to all monitors."""
        if self.monitors:
            batch = [Event(*event) for event in events]
            self._each("write_events", batch)

    def flush(self) -> None:
        """Flush every monitor."""
        self._each("flush")

    def close(self) -> None:
        """Close every monitor; the master is empty afterwards."""
        self._each("close")
        self.monitors.clear()

    def _each(self, method: str, *arguments: Sequence[Event]) -> None:
        for monitor in list(self.monitors):
            try:
                getattr(monitor, method)(*arguments)
            except Exception as error:
                self._switch_off(monitor, method, error)

    def _switch_off(self, monitor: Monitor, method: str, error: Exception) -> None:
        self.monitors.remove(monitor)
        log.warning(
            "monitor %s failed in %s (%s: %s); it is switched off and training goes on",
            monitor.name,
            method,
            type(error).__name__,
            error,
        )
        if method != "close":
            try:
                monitor.close()
            except Exception as second:
                log.debug("closing monitor %s after its failure also failed: %s", monitor.name, second)


MONITOR: StashKey[MonitorMaster] = StashKey("monitor")
"""The run's monitors, for a plugin's own metrics: in `ds_step_end`, as ``(name, value, int(metrics["samples"]))``."""
