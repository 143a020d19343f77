"""Counts, sizes and times collectives: the section ``comms_logger``, and `log_summary`, which
prints the table.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_comms_logger.log import CommsLog, CommsRow, configure, installed_log
    from ds_comms_logger.summary import log_summary

__all__ = ["CommsLog", "CommsRow", "configure", "installed_log", "log_summary"]

__getattr__, __dir__ = names_on_first_use(
    __name__, {"log": "CommsLog CommsRow configure installed_log", "summary": "log_summary"}
)
