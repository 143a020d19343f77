"""`initialize` without an optimizer: weights rest as they are; gradients pass through, and none is
kept.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch import nn

from ds_core.errors import UsageError


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def config(stage: int, **section: Any) -> dict[str, Any]:
    zero = {"stage": stage, **section}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
    }


def infer() -> None:
    import ds_core
    from ds_core import comm

    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted = net().bfloat16()(x)
    for stage, section in (
        *((s, {}) for s in range(4)),
        (3, {"param_persistence_threshold": 0, "offload_param": {"device": "cpu"}}),
    ):
        engine, optimizer, *_ = ds_core.initialize(model=net(), config=config(stage, **section))
        assert optimizer is None and torch.equal(engine(x), wanted)
        loss = engine(x + comm.rank()).square().mean()
        if stage == 0:  # gradients are those of all ranks, for an optimizer of one's own
            engine.backward(loss)
            mine = engine.module[0].weight.grad
            other = mine.clone()
            comm.broadcast(other, src=0)
            assert torch.equal(mine, other)
        else:
            assert all(b.masters.flat is b.weights.shard for b in engine.partitioner.buckets)
            with pytest.raises(
                UsageError,
                match=f"backward under zero_optimization stage {stage} needs an optimizer",
            ):
                engine.backward(loss)
            with pytest.raises(UsageError, match="needs an optimizer"):
                engine(x).sum().backward()
        engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_weights_rest_as_they_are(world: int) -> None:
    run_ranks(world, infer)


def check_passing_through(stage: int) -> None:
    """A frozen critic of its own engine: its inputs get plain torch's gradient, and so does a
    trained generator.
    """
    import ds_core
    from ds_core import comm

    zero = {"stage": stage, "param_persistence_threshold": 0}
    frozen = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero}
    critic = ds_core.initialize(model=net().double().requires_grad_(False), config=frozen)[0]
    inputs = torch.randn(
        2, 8, dtype=torch.double, generator=torch.Generator().manual_seed(comm.rank())
    )
    ours, theirs = (inputs.clone().requires_grad_() for _ in range(2))
    critic(ours).square().mean().backward()
    plain = net().double()
    plain(theirs).square().mean().backward()
    assert torch.equal(ours.grad, theirs.grad)
    ours.grad = None
    critic.backward(critic(ours).square().mean())
    assert torch.equal(ours.grad, theirs.grad)

    trained = {
        **frozen,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    generator = ds_core.initialize(model=net().double(), config=trained)[0]
    generator.backward(critic(generator(inputs)).square().mean())
    generator.step()
    generator.destroy()
    critic.destroy()
    truth = net().double()
    for rank in range(comm.world_size()):
        part = torch.randn(2, 8, dtype=torch.double, generator=torch.Generator().manual_seed(rank))
        (plain(truth(part)).square().mean() / comm.world_size()).backward()
    for mine, wanted in zip(generator.module.parameters(), truth.parameters(), strict=True):
        assert torch.allclose(mine, wanted - wanted.grad, rtol=0, atol=1e-15)


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_pass_through_a_frozen_model(stage: int, world: int) -> None:
    run_ranks(world, check_passing_through, stage)
