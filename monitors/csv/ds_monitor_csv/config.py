"""The section ``csv_monitor`` (torch-free)."""

from __future__ import annotations

from ds_core.config import option
from ds_core.filemonitor import JobFolder

__all__ = ["CSVConfig"]


class CSVConfig(JobFolder):
    """Where the CSV monitor writes, and whether."""

    enabled: bool = option(False, "Write metrics to CSV files.")
