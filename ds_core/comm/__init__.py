"""Everything that crosses ranks: starting the process group, collectives, interceptors around them,
agreement.

Names load on first use, so that `import ds_core.comm` brings in no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ds_core.comm.agreement import *  # noqa: F403
    from ds_core.comm.collectives import *  # noqa: F403
    from ds_core.comm.interceptor import *  # noqa: F403
    from ds_core.comm.providers import *  # noqa: F403
    from ds_core.comm.start import *  # noqa: F403


class _Alone:
    def __repr__(self) -> str:
        return "ALONE"


ALONE = cast("ProcessGroup", _Alone())
"""The group of this rank alone, over which collectives do nothing. (None means all ranks.)"""

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "agreement": "all_gather_json check_ranks_agree together",
        "collectives": (
            "all_gather_into_tensor all_reduce all_to_all_single barrier broadcast called irecv "
            "isend open_transport "
            "rank recv reduce reduce_scatter_tensor send use_providers world_size"
        ),
        "interceptor": "Collective Interceptor Order add_interceptor interceptors label "
        "remove_interceptor tag",
        "providers": "AfterWork GroupCollectives Work choose_providers",
        "start": "Job Rendezvous find_rendezvous init_distributed is_initialized local_rank",
    },
)
