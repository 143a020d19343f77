"""States of single parameters with nothing installed but the core: the replicated weights of plain
data parallelism.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_access import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_grad,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from ds_testing import run_ranks
from torch import nn

import ds_core
from ds_core.errors import UsageError

ADAM = {"lr": 0.1, "weight_decay": 0.0}


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def rows(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank)).double()


def read_and_write(world: int) -> None:
    """One step, read; then each state is replaced, and the second step goes on from there."""
    config: dict[str, Any] = {
        "optimizer": {"type": "AdamW", "params": ADAM},
        "gradient_clipping": 0.0,
    }
    config["train_micro_batch_size_per_gpu"] = 4
    model = net()
    engine, *_ = ds_core.initialize(model=model, config=config)
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    everything = torch.cat([rows(rank) for rank in range(world)])

    def backward() -> None:
        engine.backward(engine(rows(engine.global_rank)).square().mean())
        optimizer.zero_grad()
        plain(everything).square().mean().backward()

    def same(found: Any, wanted: Any) -> None:
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-12, atol=1e-12)

    backward()
    same(safe_get_full_grad(model.weight), plain.weight.grad)
    safe_set_full_grad(model.weight, 2 * plain.weight.grad)
    plain.weight.grad.mul_(2)
    engine.step()
    optimizer.step()
    same(safe_get_full_fp32_param(model.weight), plain.weight)
    same(
        safe_get_full_optimizer_state(model.weight, "exp_avg"),
        optimizer.state[plain.weight]["exp_avg"],
    )

    safe_set_full_fp32_param(model.bias, torch.ones(2))
    plain.bias.data.fill_(1.0)
    safe_set_full_optimizer_state(model.weight, torch.zeros(2, 3), "exp_avg")
    optimizer.state[plain.weight]["exp_avg"].zero_()
    backward()
    engine.step()
    optimizer.step()
    same(model.weight, plain.weight)
    same(model.bias, plain.bias)

    with pytest.raises(ValueError, match="exp_avgg"):
        safe_get_full_optimizer_state(model.weight, "exp_avgg")
    with pytest.raises(UsageError, match="safe_get_local_grad"):
        safe_get_local_grad(model.weight)
    assert safe_get_full_grad(net().weight) is None
    engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_read_and_written_is_what_plain_torch_has(world: int) -> None:
    run_ranks(world, read_and_write, world)
