"""The section ``csv_monitor`` (torch-free)."""

from __future__ import annotations

from ds_monitor_kit import JobFolder

from ds_core.config import option


class CSVConfig(JobFolder):
    """Where the CSV monitor writes, and whether."""

    enabled: bool = option(False, "Write metrics to CSV files.")
