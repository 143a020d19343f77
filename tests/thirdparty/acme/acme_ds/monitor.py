"""A monitor that keeps one JSON line per event."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ds_core.entries import Event


class AcmeMonitor:
    """Writes events to `path` when flushed."""

    name = "acme"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []

    def write_events(self, events: Sequence[Event]) -> None:
        """Keep `events` until the next flush."""
        self._lines += [json.dumps(list(event)) + "\n" for event in events]

    def flush(self) -> None:
        """Append what was kept."""
        with self.path.open("a", encoding="utf-8") as file:
            file.writelines(self._lines)
        self._lines.clear()

    def close(self) -> None:
        """Flush for good."""
        self.flush()
