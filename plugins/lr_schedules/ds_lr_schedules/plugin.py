"""What this distribution offers to ds_core: five schedules by name (torch-free; nothing is imported
until chosen).
"""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import SchedulerEntry

NAMES = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")


def ds_schedulers() -> Mapping[str, SchedulerEntry]:
    """The schedules that ``scheduler.type`` may name, with the models of their
    ``scheduler.params``.
    """
    return {
        name: SchedulerEntry(
            load=f"ds_lr_schedules.schedules:{name}", params=f"ds_lr_schedules.config:{name}Params"
        )
        for name in NAMES
    }
