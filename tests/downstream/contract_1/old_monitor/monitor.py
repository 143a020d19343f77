"""A monitor that appends lines of JSON to a file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ds_core.entries import Event


class OldMonitor:
    """Keeps events until `flush`, which writes them."""

    name = "old_monitor"

    def __init__(self, file: str) -> None:
        self.file = Path(file)
        self.waiting: list[str] = []

    def write_events(self, events: Sequence[Event]) -> None:
        """Take events; nothing is written yet."""
        self.waiting += [json.dumps(list(event)) for event in events]

    def flush(self) -> None:
        """Write what waits; from then on others can read it."""
        if self.waiting:
            with self.file.open("a", encoding="utf-8") as file:
                file.write("\n".join(self.waiting) + "\n")
            self.waiting = []

    def close(self) -> None:
        """Write the rest."""
        self.flush()
