"""Sums in the order of the ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_core.comm import GroupCollectives

SMALL = 65536  # bytes


class OldCollectives(GroupCollectives):
    """The collectives of one group. What goes to ``super()``, on all its ranks or on none, is torch.distributed's."""

    def all_reduce(self, tensor: Tensor, op: Any, async_op: bool) -> Any:
        """Small fp32 sums are gathered, and added here."""
        small = 0 < tensor.nbytes <= SMALL and tensor.dtype == torch.float32
        if not small or op != dist.ReduceOp.SUM or async_op:
            return super().all_reduce(tensor, op, async_op)
        rows = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(rows, tensor, self.group)
        tensor.copy_(sum(rows[1:], start=rows[0]))
        return None
