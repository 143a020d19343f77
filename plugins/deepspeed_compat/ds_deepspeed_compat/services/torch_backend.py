"""``deepspeed.comm.TorchBackend``: the functions of ``deepspeed.comm`` as methods of one object."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ds_deepspeed_compat.services import comm


class TorchBackend:
    """torch.distributed under DeepSpeed's names. What is running already is taken as it is.

    Each function of ``deepspeed.comm`` is a method. Raises what
    `torch.distributed.init_process_group` raises.
    """

    def __init__(
        self,
        backend: str,
        timeout: timedelta | None,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
        name: str = "torch",
    ) -> None:
        self.name = name
        self.ranks: list[int] = []
        self.single_gpu_mode = True
        self.has_all_reduce_coalesced = comm.has_all_reduce_coalesced()
        self.has_coalescing_manager = comm.has_coalescing_manager()
        self.init_process_group(backend, timeout, init_method, rank, world_size)
        self.initialized = True

    def init_process_group(
        self,
        backend: str,
        timeout: timedelta | None,
        init_method: str | None,
        rank: int = -1,
        world_size: int = -1,
    ) -> None:
        """Start torch's process group, unless one is running."""
        if not dist.is_initialized():
            dist.init_process_group(backend, init_method, timeout, world_size, rank)
        self.using_mpi = dist.get_backend() == "mpi"
        self.single_gpu_mode = dist.get_world_size() == 1

    def is_initialized(self) -> bool:
        """Whether a process group is running."""
        return comm.is_initialized()

    def init_device_mesh(self, mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
        """torch's mesh of devices, of the accelerator's kind."""
        from ds_core.accelerator import get_accelerator

        return init_device_mesh(
            get_accelerator().device_type, mesh_shape, mesh_dim_names=mesh_dim_names
        )

    def get_backend(self, group: Any = None) -> str:
        """The name of the group's backend."""
        return str(dist.get_backend(group))

    def __getattr__(self, name: str) -> Any:
        if name not in comm.__all__:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        return getattr(comm, name)
