"""A rank's contribution to an all-gather may lie in its place in the output already."""

from __future__ import annotations

import pytest
import torch
from ds_testing import run_ranks

from ds_core import comm


def gathered(length: int, dtype: str, async_op: bool) -> bool:
    rank, world = comm.rank(), comm.world_size()
    parts = [torch.arange(length).mul(r + 1).remainder(251).to(getattr(torch, dtype)) for r in range(world)]
    whole = torch.full((world * length,), 99, dtype=parts[0].dtype)
    mine = whole[rank * length : (rank + 1) * length]
    mine.copy_(parts[rank])
    work = comm.all_gather_into_tensor(whole, mine, async_op=async_op)
    if work is not None:
        work.wait()
    return torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("length", [3, 70_001, 400_002])  # through each of the algorithms over gloo
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("async_op", [False, True])
def test_all_gather_in_place(world: int, length: int, dtype: str, async_op: bool) -> None:
    assert run_ranks(world, gathered, length, dtype, async_op) == [True] * world
