"""Several engines in one process: one model has one engine; how a window's gradients came about."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import ds_core
from ds_core.errors import UsageError


def config(gas: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        **more,
    }


def start(model: nn.Module, gas: int = 1, **more: Any) -> Any:
    return ds_core.initialize(model=model, config=config(gas, **more))[0]


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def data(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -- one model, one engine -------------------------------------------------------------------------


def test_a_part_of_a_model_in_use_or_something_around_it_cannot_be_taken() -> None:
    net = model()
    engine = start(net)
    with pytest.raises(
        UsageError, match=r"the model belongs|the parameter 'weight' of the model belongs"
    ):
        start(net[0])  # type: ignore[index]
    with pytest.raises(UsageError, match=r"the parameter '0\.0\.weight' of the model belongs"):
        start(nn.Sequential(net, nn.Linear(1, 1).double()))
    engine.destroy()


def test_frozen_parts_may_be_shared() -> None:
    net = model()
    engine = start(net)
    for param in net.parameters():
        param.requires_grad_(False)
    other = start(nn.Sequential(net, nn.Linear(1, 1).double()))
    other.backward(other(data(1)).square().mean())
    other.step()
    assert other.was_step_applied()
    engine.destroy()
    other.destroy()


@pytest.mark.parametrize("cycle", [False, True])
def test_a_forgotten_engine_is_no_hindrance_and_leaves_no_hooks(cycle: bool) -> None:
    net = model()
    truth = copy.deepcopy(net)
    gc.disable()  # so that it is our own collection that finds the cycle
    try:
        engine = start(net, gas=2, data_types={"grad_accum_dtype": "fp32"})
        if cycle:
            engine.loop = engine
        del engine
        engine = start(net)
    finally:
        gc.enable()
    engine.backward(engine(data(1)).square().mean())
    engine.step()
    loss = truth(data(1)).square().mean()
    loss.backward()
    torch.optim.SGD(truth.parameters(), lr=0.5).step()
    for mine, theirs in zip(net.parameters(), truth.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        # one rank, no accumulation: none is needed
        assert len(mine._post_accumulate_grad_hooks or ()) == 0
    engine.destroy()
