"""The declaration of old-scheduler: a learning-rate schedule (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import SchedulerEntry


def ds_schedulers() -> Mapping[str, SchedulerEntry]:
    """Without ``params=`` the keys of ``scheduler.params`` are checked against the function's arguments."""
    return {
        "OldScheduler": SchedulerEntry(
            "old_scheduler.schedule:halving",
            params="old_scheduler.params:Params",
        )
    }
