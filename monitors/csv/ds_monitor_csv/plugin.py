"""What this distribution offers to ds_core: the section ``csv_monitor`` and its monitor
(torch-free).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.context import Context
    from ds_core.engine import Monitor


def ds_config() -> type[BaseModel]:
    """The section ``csv_monitor``."""
    from ds_monitor_csv.config import CSVConfig

    return CSVConfig


def ds_monitors(ctx: Context) -> Iterable[Monitor]:
    """One monitor when ``csv_monitor.enabled``, else none.

    Touches no file before the first flush.
    """
    from ds_monitor_kit import Background

    from ds_monitor_csv.config import CSVConfig
    from ds_monitor_csv.monitor import CSVMonitor

    section = ctx.config.section(CSVConfig)
    if section is None or not section.enabled:
        return []
    return [Background(CSVMonitor(section.directory()))]
