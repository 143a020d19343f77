"""The conformance kit's part for ``collectives``: what a transport gives is, bit for bit, what the backend gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["comparisons"]

SIZES = (1, 3, 1000, 70_001, 700_003)


def comparisons(
    function: Callable[..., Any], device: str, dtypes: tuple[str, ...]
) -> Iterator[tuple[str, Callable[[], None]]]:
    """On two and on three ranks (worker processes); `function` must be one of a module's own."""
    from ds_testing.pool import run_ranks

    where = f"{function.__module__}:{function.__qualname__}"
    for ranks in (2, 3):
        yield f"{ranks} ranks", lambda ranks=ranks: run_ranks(ranks, _compare, where)  # type: ignore[misc]


def _compare(where: str) -> None:
    from ds_core.comm import shared
    from ds_core.entries import resolve

    results: list[list[Tensor]] = []
    for opener in (None, resolve(where)):
        shared.configure(opener)
        results.append(_all())
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def _all() -> list[Tensor]:
    import torch.distributed as dist

    from ds_core import comm

    rank, size = comm.rank(), comm.world_size()
    generator = torch.Generator().manual_seed(rank)
    out: list[Tensor] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64):
        for numel in SIZES:
            whole = torch.randn(numel * size, generator=generator).mul(9).to(dtype)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
                total, part = whole[:numel].clone(), torch.empty(numel, dtype=dtype)
                work = comm.all_reduce(total, op, async_op=True)
                comm.reduce_scatter_tensor(part, whole, op)
                assert work is not None
                work.wait()
                out += [total, part]
            gathered = torch.empty_like(whole)
            comm.all_gather_into_tensor(gathered, whole[:numel])
            out.append(gathered)
    return out + _messages()


def _messages() -> list[Tensor]:
    """Over a group of their own, since the way of a group's messages is chosen once."""
    import torch.distributed as dist

    from ds_core import comm

    group = dist.new_group()
    comm.open_transports([group])
    rank, size = comm.rank(), comm.world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    sent = [torch.arange(n) * 7 + rank for n in SIZES]
    ahead, late = ([torch.zeros_like(t) for t in sent] for _ in range(2))
    works = [comm.irecv(t, left, group) for t in ahead] + [comm.isend(t, right, group) for t in sent]
    comm.all_reduce(torch.ones(5), group=group)
    works += [comm.isend(t, left, group) for t in sent]
    for work in [comm.irecv(t, right, group) for t in late][::-1] + works:
        work.wait()
    dist.destroy_process_group(group)
    return ahead + late
