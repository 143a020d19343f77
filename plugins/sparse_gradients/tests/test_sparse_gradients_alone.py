"""With nothing installed but what the package declares: the weights of plain torch, and fewer bytes
on the way.
"""

from __future__ import annotations

import pytest
import torch
from ds_testing import Traffic, run_ranks
from torch import Tensor, nn

import ds_core
from ds_core import comm

ROWS = 300
WIDTH = 4
EACH = 3


def net() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH, 2)).double()


def ids_of(step: int, rank: int) -> Tensor:
    return torch.randint(
        0, ROWS, (EACH,), generator=torch.Generator().manual_seed(10 * step + rank)
    )


def trained(sparse: bool) -> tuple[float, int]:
    """How far weights are from plain torch's after three steps, and the bytes of the last one."""
    world = comm.world_size()
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    model = net()
    engine, *_ = ds_core.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        config={"train_micro_batch_size_per_gpu": EACH, "sparse_gradients": sparse},
    )
    sent = 0
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(world):
            (plain(ids_of(step, rank)).square().mean() / world).backward()
        optimizer.step()
        with Traffic() as traffic:
            engine.backward(engine(ids_of(step, comm.rank())).square().mean())
            engine.step()
        sent = sum(each.bytes for each in traffic.sent)
    engine.destroy()
    off = max(
        float((a - b).detach().abs().max())
        for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
    return off, sent


@pytest.mark.parametrize("world", [2, 4])
def test_it_trains_as_one_process_with_fewer_bytes(world: int) -> None:
    by_rows = run_ranks(world, trained, True)
    whole = run_ranks(world, trained, False)
    for (off, few), (dense_off, many) in zip(by_rows, whole, strict=True):
        assert max(off, dense_off) < 1e-12
        assert few < many / 4
