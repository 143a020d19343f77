"""Which positions of a sequence each rank has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ds_comm_autograd import gather
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_core import comm
from ds_core.errors import UsageError


@dataclass(frozen=True)
class Layout:
    """The positions of a sequence over ranks, in parts whose lengths differ by little.

    Positions of a rank ascend.
    """

    length: int
    """Of the full sequence."""
    ranks: int
    zigzag: bool = False
    """Cut into twice as many chunks, of which each rank has one from the front and one from the back,
    so that causal attention is the same work for all. Without it each rank has one stretch."""

    def __post_init__(self) -> None:
        if self.length < self.ranks:
            raise UsageError(
                f"a sequence of {self.length} tokens cannot be divided over {self.ranks} ranks; "
                "use longer sequences or a smaller sequence_parallel.size"
            )

    def pieces(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The stretches (first, end) that `rank` has."""
        # With fewer positions than chunks some would be empty.
        zigzag = self.zigzag and self.length >= 2 * self.ranks
        count = self.ranks * (2 if zigzag else 1)
        chunks = (rank, count - 1 - rank) if zigzag else (rank,)
        return tuple((self.length * i // count, self.length * (i + 1) // count) for i in chunks)

    @property
    def sizes(self) -> list[int] | None:
        """The number of positions of each rank; None where all are equal."""
        sizes = [sum(end - first for first, end in self.pieces(r)) for r in range(self.ranks)]
        return None if len(set(sizes)) == 1 else sizes

    def cut(self, whole: Tensor, rank: int, dim: int) -> Tensor:
        """The part of `rank`."""
        if whole.shape[dim] != self.length:
            raise UsageError(
                f"an input of shape {tuple(whole.shape)} has {whole.shape[dim]} positions along "
                f"dimension {dim}, where the sequence has {self.length}"
            )
        parts = [whole.narrow(dim, first, end - first) for first, end in self.pieces(rank)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def positions(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """The positions of `rank`, ascending."""
        return torch.cat(
            [torch.arange(first, end, device=device) for first, end in self.pieces(rank)]
        )

    def in_order(self, parts: Tensor, dim: int) -> Tensor:
        """The whole sequence of all ranks' parts, one after the other along `dim`."""
        if not self.zigzag:
            return parts
        # The ranks' positions one after the other; their order sorts the parts.
        order = torch.cat([self.positions(rank) for rank in range(self.ranks)]).argsort()
        return parts.index_select(dim, order.to(parts.device))


def cut(whole: Tensor, group: ProcessGroup | None, dim: int = 1, *, zigzag: bool = False) -> Tensor:
    """This rank's part of a tensor that all ranks of `group` have in full.

    For example tokens, labels or position ids.

    zigzag: as ring attention has it; see `Layout`. Gradients do not come back together: it is for
    inputs.
    """
    layout = Layout(whole.shape[dim], comm.world_size(group), zigzag)
    return layout.cut(whole, comm.rank(group), dim)


def joined(part: Tensor, group: ProcessGroup | None, layout: Layout, dim: int = 1) -> Tensor:
    """The full tensor of which each rank of `group` has its `part`, such as logits.

    The gradient is this rank's part.
    """
    return layout.in_order(gather(part, group, dim, layout.sizes), dim)
