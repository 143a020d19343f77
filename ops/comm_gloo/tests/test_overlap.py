"""Between hosts, a bucket of gradients is exchanged while the backward of the next one goes on."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from ds_comm_gloo import GlooCollectives
from ds_comm_gloo.two_level import TwoLevel
from ds_testing import run_ranks
from torch import Tensor, nn
from torch import distributed as dist

import ds_core
from ds_core import comm
from ds_core.gradients import buckets

LAYOUT = "aab"
PATIENCE = 20.0


class Gate(torch.autograd.Function):
    """Identity, whose backward asks `when` to return first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, when: Any) -> Tensor:
        ctx.when = when
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.when()
        return grad, None


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 32)
        self.second = nn.Linear(32, 1)
        self.between: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Gate.apply(self.first(x), self.between)).sum()


def step(stage: int) -> list[bool]:
    """Whether a reduction had begun when backward stood between the layers, and whether it ended
    while it stood.
    """
    served: list[GlooCollectives] = []

    def serve(group: dist.ProcessGroup, messages: bool) -> GlooCollectives:
        served.append(GlooCollectives(group, messages, key=lambda: LAYOUT[dist.get_rank()]))
        return served[-1]

    def running(engine: Any) -> list[Any]:
        partitioner = engine.partitioner
        if stage == 0:
            return [b._work for b in partitioner._buckets if b._work is not None]
        return [work for reduction in partitioner.reducer._in_flight for work in reduction.works]

    zero = (
        {"stage": stage, "overlap_comm": True, "reduce_bucket_size": 32} if stage else {"stage": 0}
    )
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": optimizer,
        "zero_optimization": zero,
    }
    whole, buckets.BUCKET_BYTES = buckets.BUCKET_BYTES, 1  # a bucket for each parameter
    module = Two()
    found = []
    try:
        engine, *_ = ds_core.initialize(model=module, config=config)
        # after `initialize`, which chooses the config's
        comm.use_providers({("cpu", "gloo"): serve})
        assert dist.group.WORLD is not None
        comm.open_transport(dist.group.WORLD)
        for _ in range(2):

            def between() -> None:
                begun = running(engine)
                end = time.monotonic() + PATIENCE
                # Backward does not go on, so whatever ends now ends beside it.
                while not all(work.is_completed() for work in begun) and time.monotonic() < end:
                    time.sleep(0.001)
                found.append(bool(begun) and all(work.is_completed() for work in begun))

            module.between = between
            loss = engine(torch.ones(2, 32))
            engine.backward(loss)
            engine.step()
        levels = [s.transport for s in served if isinstance(s.transport, TwoLevel)]
        assert any(level.pipeline._started for level in levels)
        engine.destroy()
    finally:
        buckets.BUCKET_BYTES = whole
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_bucket_crosses_while_backward_stands_at_the_next(stage: int) -> None:
    assert run_ranks(len(LAYOUT), step, stage) == [[True, True]] * len(LAYOUT)
