"""Several engines in one process: one model has one engine; how a window's gradients came about."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from ds_testing.truth import start
from torch import nn

from ds_core.errors import UsageError

SGD = {"type": "SGD", "params": {"lr": 0.5}}


def engine_of(model: nn.Module, gas: int = 1, **more: Any) -> Any:
    return start(model, gas=gas, optimizer=SGD, **more)


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def data(seed: int) -> torch.Tensor:
    return torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# -- one model, one engine -------------------------------------------------------------------------


def test_a_part_of_a_model_in_use_or_something_around_it_cannot_be_taken() -> None:
    net = model()
    engine = engine_of(net)
    with pytest.raises(
        UsageError, match=r"the model belongs|the parameter 'weight' of the model belongs"
    ):
        engine_of(net[0])  # type: ignore[index]
    with pytest.raises(UsageError, match=r"the parameter '0\.0\.weight' of the model belongs"):
        engine_of(nn.Sequential(net, nn.Linear(1, 1).double()))
    engine.destroy()


def test_frozen_parts_may_be_shared() -> None:
    net = model()
    engine = engine_of(net)
    for param in net.parameters():
        param.requires_grad_(False)
    other = engine_of(nn.Sequential(net, nn.Linear(1, 1).double()))
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
        engine = engine_of(net, gas=2, data_types={"grad_accum_dtype": "fp32"})
        if cycle:
            engine.loop = engine
        del engine
        engine = engine_of(net)
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
