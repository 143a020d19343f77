"""`DeepSpeedDataLoader`: ds_core's loader with DeepSpeed's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ds_core import comm
from ds_core.engine import DistributedLoader, LoaderRequest


class DeepSpeedDataLoader(DistributedLoader):
    """Batches of this rank's share of `dataset`, shuffled anew in each epoch.

    data_parallel_world_size, data_parallel_rank: all ranks and this one, unless told. local_rank,
    tput_timer and deepspeed_dataloader_config have no use here. No worker processes unless told.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool = False,
        local_rank: int = -1,
        tput_timer: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            LoaderRequest(
                dataset,
                batch_size,
                replicas=comm.world_size()
                if data_parallel_world_size is None
                else data_parallel_world_size,
                index=comm.rank() if data_parallel_rank is None else data_parallel_rank,
                drop_last=dataloader_drop_last,
                collate_fn=collate_fn,
                num_workers=num_local_io_workers or 0,
                pin_memory=pin_memory,
                sampler=data_sampler,
            )
        )
