"""``deepspeed.runtime.utils.PartitionedTensor``: a tensor of which each rank of a group has one
flat part.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_core import comm
from ds_deepspeed_compat.utils.helpers import partition_uniform


class PartitionedTensor:
    """One flat part of a tensor on each rank of a group; `full` is the whole tensor again.

    Other ranks get what they need to know of it as a tensor of int64, `to_meta`: the number of
    dimensions, the sizes, the number of parts, the rank, and the boundaries of the parts.
    """

    def __init__(self, tensor: Tensor, group: Any, partition_meta: Any = None) -> None:
        self.group = group
        self.num_parts = comm.world_size(group)
        self.rank = comm.rank(group)
        self.orig_size = list(tensor.shape)
        self.orig_device: Any = tensor.device
        self.partition = partition_uniform(tensor.numel(), self.num_parts)
        mine = slice(self.partition[self.rank], self.partition[self.rank + 1])
        self.local_data = tensor.detach().reshape(-1)[mine].clone()

    @classmethod
    def from_meta(
        cls, meta: Tensor, local_part: Tensor, group: Any, device: Any = None
    ) -> PartitionedTensor:
        """The tensor that `meta`, of another's `to_meta`, describes.

        Raises ValueError for one of another group.
        """
        dimensions, *rest = meta.tolist()
        sizes = rest[:dimensions]
        (parts, rank, *partition) = rest[dimensions:]
        # Of an empty tensor, for the group's size and this rank; the rest is what `meta` says.
        made = cls(torch.empty(0), group)
        if (parts, rank) != (made.num_parts, made.rank):
            raise ValueError(
                f"the tensor is part {rank} of {parts}, and this process is {made.rank} of "
                f"{made.num_parts}"
            )
        made.orig_size = sizes
        made.orig_device = local_part.device if device is None else device
        made.partition = partition
        made.local_data = local_part.detach()
        return made

    def to_meta(self) -> Tensor:
        """What `from_meta` takes, on the tensor's device."""
        numbers = [len(self.orig_size), *self.orig_size, self.num_parts, self.rank, *self.partition]
        return torch.tensor(numbers, dtype=torch.long, device=self.orig_device)

    def data(self) -> Tensor:
        """This rank's part."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """The shape of this rank's part."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """The shape of the whole."""
        return self.orig_size

    def full(self, device: Any = None) -> Tensor:
        """The whole tensor. Collective over the group."""
        device = self.orig_device if device is None else device
        whole = torch.empty(math.prod(self.orig_size), dtype=self.local_data.dtype, device=device)
        for part in range(self.num_parts):
            # Parts may differ by one element, and a broadcast of each takes any size.
            piece = whole[self.partition[part] : self.partition[part + 1]]
            if part == self.rank:
                piece.copy_(self.local_data)
            source = dist.get_global_rank(self.group, part) if self.group is not None else part
            comm.broadcast(piece, src=source, group=self.group)
        return whole.view(self.orig_size)
