"""The monitor for trackio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_monitor_kit import rows

from ds_core.entries import Event
from ds_monitor_trackio.config import TrackioConfig


class TrackioMonitor:
    """Logs to the run of this process where the program has started one, else to a new one, which
    it finishes.

    config: recorded with a new run; it must hold no secrets.
    """

    name = "trackio"

    def __init__(self, section: TrackioConfig, config: Mapping[str, Any]) -> None:
        import trackio
        from trackio import context_vars

        # A run that the program has started is also for the program to finish.
        current = context_vars.current_run.get()
        self._owned = current is None
        self._run: Any = current or trackio.init(
            project=section.project,
            name=section.name,
            group=section.group,
            config=dict(config),
            resume=section.resume,
            space_id=section.space_id,
            embed=False,
        )

    def write_events(self, events: Sequence[Event]) -> None:
        """Hand the events to trackio, a row per step."""
        for step, row in rows(events):
            self._run.log(row, step=step)

    def flush(self) -> None:
        """Nothing: a thread of trackio's writes what it has every half second."""

    def close(self) -> None:
        """Finish the run, if it was started here; trackio then has written all of it."""
        if self._owned:
            self._owned = False
            self._run.finish()
