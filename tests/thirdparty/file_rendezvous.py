"""A batch system of somebody else's, whose ranks meet at a file on a shared disk: no port is
opened.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ds_core.entries import RendezvousEntry

if TYPE_CHECKING:
    from ds_core.comm.start import Job, Rendezvous


def ds_rendezvous() -> RendezvousEntry:
    """Asked where ``ACME_RANK`` is set; a higher priority than that of dscore-rendezvous."""
    return RendezvousEntry(
        "file_rendezvous:find", "file_rendezvous:open_store", ("ACME_RANK",), priority=10
    )


def find(env: Mapping[str, str]) -> Job | None:
    """This process's place in the job, from the batch system's variables."""
    from ds_core.comm.start import Job

    if "ACME_RANK" not in env:
        return None
    known = {
        "RANK": env["ACME_RANK"],
        "WORLD_SIZE": env["ACME_RANKS"],
        "LOCAL_RANK": env["ACME_RANK"],
    }
    return Job("Acme's variables", {**known, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})


def open_store(where: Rendezvous, timeout: timedelta) -> Any:
    """A store in the job's file."""
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    store = FileStore(os.environ["ACME_FILE"], where.world_size)
    store.set_timeout(timeout)
    return store
