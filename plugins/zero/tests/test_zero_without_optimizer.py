"""`initialize` without an optimizer: weights rest as they are, for inference; a backward is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch import nn

from ds_core.errors import UsageError


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def config(stage: int, **section: Any) -> dict[str, Any]:
    zero = {"stage": stage, **section}
    return {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "zero_optimization": zero}


def infer() -> None:
    import ds_core
    from ds_core import comm

    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = build().bfloat16()(x)
    for stage, section in (
        *((s, {}) for s in range(4)), (3, {"param_persistence_threshold": 0, "offload_param": {"device": "cpu"}}),
    ):  # fmt: skip
        engine, optimizer, *_ = ds_core.initialize(model=build(), config=config(stage, **section))
        assert optimizer is None and torch.equal(engine(x), wanted)
        loss = engine(x + comm.rank()).square().mean()
        if stage == 0:  # gradients are those of all ranks, for an optimizer of one's own
            engine.backward(loss)
            mine = engine.module[0].weight.grad
            other = mine.clone()
            comm.broadcast(other, src=0)
            assert torch.equal(mine, other)
        else:
            assert all(b.master is b.shard for b in engine.partitioner.buckets)
            with pytest.raises(UsageError, match=f"backward under zero_optimization stage {stage} needs an optimizer"):
                engine.backward(loss)
            with pytest.raises(UsageError, match="needs an optimizer"):
                engine(x).sum().backward()
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_weights_rest_as_they_are(world: int) -> None:
    run_ranks(world, infer)
