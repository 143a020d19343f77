"""A provider of collectives of somebody else's: sums of small tensors in rank order, the same in
every run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_core.config import Section
from ds_core.entries import CollectivesEntry

CALLS: list[int] = []
"""The lengths that were summed here."""


class Settings(Section):
    """The section ``ordered_sums``."""

    largest: int = 65536


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_collectives() -> Mapping[str, CollectivesEntry]:
    """Priority -1: it must be asked for."""
    return {
        "ordered": CollectivesEntry(
            "ordered_sums:ordered_sums", device="cpu", backend="gloo", priority=-1
        )
    }


def ordered_sums(group: Any, messages: bool, config: Any = None) -> Any:
    import torch
    import torch.distributed as dist

    from ds_core import comm

    settings = (config.section(Settings) if config is not None else None) or Settings()

    class OrderedSums(comm.GroupCollectives):
        def all_reduce(self, tensor: torch.Tensor, op: Any, async_op: bool) -> Any:
            small = 0 < tensor.nbytes <= settings.largest and tensor.dtype == torch.float32
            if not small or op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
                return super().all_reduce(tensor, op, async_op)
            rows = [torch.empty_like(tensor) for _ in range(self.size)]
            dist.all_gather(rows, tensor, self.group)
            tensor.copy_(torch.stack(rows).sum(0))
            if op == dist.ReduceOp.AVG:
                tensor.div_(self.size)
            CALLS.append(tensor.numel())
            return comm.AfterWork(()) if async_op else None

    return OrderedSums(group, messages)
