"""Rows of tokens to the ranks that have their experts, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core import comm

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, out: list[int], inn: list[int], group: Any) -> Tensor:
        ctx.args = out, inn, group
        y = x.new_empty((sum(out), *x.shape[1:]))
        comm.all_to_all_single(y, x.contiguous(), out, inn, group)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        out, inn, group = ctx.args
        y = g.new_empty((sum(inn), *g.shape[1:]))
        comm.all_to_all_single(y, g.contiguous(), inn, out, group)
        return y, None, None, None


def exchange(
    x: Tensor, index: Tensor, experts: int, size: int, group: ProcessGroup
) -> tuple[Tensor, list[int], Callable[[Tensor], Tensor]]:
    """x [T,H], index [T,k] -> rows by local expert, counts per local expert, and the way back to [T,k,H]."""
    tokens, k = index.shape
    flat = index.reshape(-1)
    order = flat.argsort(stable=True)
    sent = torch.bincount(flat, minlength=experts)
    rows = x[order // k]
    local = experts // size
    got = torch.empty_like(sent)
    comm.all_to_all_single(got, sent, group=group)
    by_source = got.view(size, local)
    inn = sent.view(size, local).sum(1).tolist()
    out = by_source.sum(1).tolist()
    rows = _AllToAll.apply(rows, out, inn, group)
    expert = torch.arange(local, device=x.device).repeat(size).repeat_interleave(by_source.reshape(-1))
    local_order = expert.argsort(stable=True)
    rows = rows[local_order]

    def back(done: Tensor) -> Tensor:
        home = torch.empty_like(done).index_copy(0, local_order, done) if False else done[local_order.argsort()]
        home = _AllToAll.apply(home, inn, out, group)
        return home[order.argsort()].view(tokens, k, -1)

    return rows, by_source.sum(0).tolist(), back
