"""Everything that crosses ranks: starting the process group, collectives chosen per backend, agreement, the log.

Names load on first use, so that `import ds_core.comm` brings in no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_core.comm.collectives import (
        Work,
        all_gather,
        all_gather_into_tensor,
        all_reduce,
        all_to_all_single,
        barrier,
        batch_isend_irecv,
        broadcast,
        gather,
        irecv,
        isend,
        meet,
        rank,
        recv,
        reduce,
        reduce_scatter_tensor,
        scatter,
        send,
        world_size,
    )
    from ds_core.comm.fingerprint import check_ranks_agree
    from ds_core.comm.guard import label, watch_place
    from ds_core.comm.log import CommsLog, CommsRow, configure, log_summary, reset
    from ds_core.comm.objects import all_gather_json, broadcast_json
    from ds_core.comm.start import find_rendezvous, init_distributed, is_initialized, local_rank

__all__ = [
    "CommsLog",
    "CommsRow",
    "Work",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_json",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_json",
    "check_ranks_agree",
    "configure",
    "find_rendezvous",
    "gather",
    "init_distributed",
    "irecv",
    "is_initialized",
    "isend",
    "label",
    "local_rank",
    "log_summary",
    "meet",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter_tensor",
    "reset",
    "scatter",
    "send",
    "watch_place",
    "world_size",
]

_HOME = {
    "all_gather_json": "objects",
    "broadcast_json": "objects",
    "check_ranks_agree": "fingerprint",
    "find_rendezvous": "start",
    "init_distributed": "start",
    "is_initialized": "start",
    "local_rank": "start",
    "label": "guard",
    "watch_place": "guard",
    "CommsLog": "log",
    "CommsRow": "log",
    "configure": "log",
    "log_summary": "log",
    "reset": "log",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'collectives')}"), name)
    globals()[name] = value
    return value
