"""The CSV monitor: `CSVFiles` behind the core's buffering."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ds_monitor_kit import BufferedMonitor, Buffering

from ds_monitor_csv.files import CSVFiles

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CSVMonitor(BufferedMonitor):
    """Writes ``<directory>/<name with "/" as "_">.csv``: a header, and a row ``step,value`` per
    event.

    directory: made when first needed. flush_events, flush_seconds, clock: see `BufferedMonitor`.
    """

    def __init__(self, directory: Path, **buffering: Unpack[Buffering]) -> None:
        super().__init__("csv_monitor", CSVFiles(directory), **buffering)
