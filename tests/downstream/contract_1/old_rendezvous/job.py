"""The batch system's variables, by the names that torchrun uses."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.comm.start import Job

PREFIX = "OLD_RENDEZVOUS_"
NAMES = {"RANK": "RANK", "WORLD_SIZE": "SIZE", "LOCAL_RANK": "SLOT", "MASTER_ADDR": "HOST"}


def find(environment: Mapping[str, str]) -> Job | None:
    """The job that this process belongs to; None for a process alone."""
    if f"{PREFIX}RANK" not in environment:
        return None
    return Job("the batch system's variables", {name: environment[PREFIX + own] for name, own in NAMES.items()})
