"""What dscore-comms-guard offers to ds_core: the section ``comms_guard`` and its interceptor
(torch-free).

It stands in both groups of entry points: as a backend it is asked for interceptors in every run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.comm.interceptor import Interceptor
    from ds_core.config import RunConfig


def ds_config() -> type[BaseModel]:
    """The section ``comms_guard``."""
    from ds_comms_guard.config import CommsGuard

    return CommsGuard


def ds_interceptors(config: RunConfig) -> Iterable[Interceptor]:
    """The guard of this job, with several ranks: it tells of waits, and may end wrong jobs."""
    from ds_core import comm

    if comm.world_size() == 1 and not comm.interceptors():
        return ()
    from ds_comms_guard.config import CommsGuard
    from ds_comms_guard.guard import guard_of_job

    section = config.section(CommsGuard)
    own = (item.rpartition("=")[2].strip() for item in config.core.plugins.load)
    guard = guard_of_job(section if section is not None else CommsGuard(), packages=own)
    return () if guard is None else (guard,)
