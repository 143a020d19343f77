"""Everything that crosses ranks: starting the process group, collectives chosen per backend, agreement, the log.

Names load on first use, so that `import ds_core.comm` brings in no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ds_core.lazy import names_on_first_use

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

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
        open_transports,
        rank,
        recv,
        reduce,
        reduce_scatter_tensor,
        scatter,
        send,
        world_size,
    )
    from ds_core.comm.fingerprint import check_ranks_agree
    from ds_core.comm.interceptor import (
        Activity,
        Collective,
        Interceptor,
        Order,
        add_interceptor,
        interceptors,
        label,
        register_activity,
        remove_interceptor,
        tag,
    )
    from ds_core.comm.objects import all_gather_json, broadcast_json
    from ds_core.comm.start import find_own, find_rendezvous, init_distributed, is_initialized, local_rank

__all__ = [
    "ALONE",
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
    "find_own",
    "find_rendezvous",
    "gather",
    "init_distributed",
    "irecv",
    "is_initialized",
    "isend",
    "label",
    "local_rank",
    "open_transports",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "world_size",
    "Activity",
    "Collective",
    "Interceptor",
    "Order",
    "add_interceptor",
    "interceptors",
    "register_activity",
    "remove_interceptor",
    "tag",
]


class _Alone:
    def __repr__(self) -> str:
        return "ALONE"


ALONE = cast("ProcessGroup", _Alone())
"""The group of this rank alone, over which collectives do nothing. (None means all ranks.)"""

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "collectives": (
            "Work all_gather all_gather_into_tensor all_reduce all_to_all_single barrier batch_isend_irecv "
            "broadcast gather irecv isend open_transports rank recv reduce reduce_scatter_tensor scatter send "
            "world_size"
        ),
        "fingerprint": "check_ranks_agree",
        "interceptor": (
            "Activity Collective Interceptor Order add_interceptor interceptors label register_activity "
            "remove_interceptor tag"
        ),
        "objects": "all_gather_json broadcast_json",
        "start": "find_own find_rendezvous init_distributed is_initialized local_rank",
    },
)
