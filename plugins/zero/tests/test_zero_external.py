"""Parameters that are used elsewhere, and modules that are attached after initialize."""

from __future__ import annotations

import logging
from typing import Any

import ds_zero
import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import plain, same
from torch import Tensor, nn
from torch.nn import functional as F

from ds_core.errors import UsageError
from plugins.zero.tests.gathered_models import D, gathered_engine, step, unused_are_sharded, weights


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D, D))


class User(nn.Module):
    """Uses a parameter that nothing tells of: it goes by a list."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.inside = nn.Identity()
        self.hidden = [weight]

    def forward(self, x: Tensor) -> Any:
        return F.linear(self.inside(x), self.hidden[0])


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.holder = Holder()
        self.user = User(self.holder.weight)
        self.first = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Any:
        return self.user(self.first(x))


def check_external(early: bool, by_context: bool) -> None:
    from ds_core import comm

    with ds_zero.Init(enabled=early):
        torch.manual_seed(0)
        model = Outside()
    register = ds_zero.register_external_parameter
    unregister = ds_zero.unregister_external_parameter
    stranger = nn.Parameter(torch.ones(2))
    weight = model.holder.weight
    if early:
        register(model.user, weight)
        register(model.user, stranger)
        with pytest.raises(
            UsageError, match=r"register_external_parameter\(User, .*\(2,\) belongs to no module"
        ):
            gathered_engine(3, model=model, param_persistence_threshold=0)
        unregister(model.user, stranger)
    engine = gathered_engine(3, model=model, param_persistence_threshold=0, max_reuse_distance=0)
    if not early:
        with pytest.raises(RuntimeError):
            engine(torch.ones(4, D))
        with pytest.raises(
            UsageError, match=r"\(2,\) belongs to no module that was given to initialize"
        ):
            register(model.user, stranger)
        if by_context:
            with ds_zero.GatheredParameters(weight, fwd_module=model.user):
                pass
        else:
            register(model.user, weight)
    torch.manual_seed(0)
    wanted = Outside()
    for seed in range(2):
        step(engine, seed)
        unused_are_sharded(engine)
    plain(
        wanted,
        lambda seed, rank: torch.randn(
            4, D, generator=torch.Generator().manual_seed(10 * seed + rank)
        ),
        2,
        count=comm.world_size(),
    )
    same(weights(engine), wanted, 1e-6)
    unregister(model.user, weight)
    with pytest.raises(RuntimeError):
        engine(torch.ones(4, D))
    with pytest.raises(UsageError, match="was not registered with this User"):
        unregister(model.user, weight)
    with pytest.raises(UsageError, match="the first argument must be a module, not int"):
        register(3, weight)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the second argument must be an nn.Parameter, not Tensor"):
        register(model.user, torch.ones(2))  # type: ignore[arg-type]
    engine.destroy()


@pytest.mark.parametrize(("early", "by_context"), [(True, False), (False, False), (False, True)])
def test_external_parameters(early: bool, by_context: bool) -> None:
    run_ranks(2, check_external, early, by_context)


class Wrapper(nn.Module):
    """What adapters do: put a module in another's place, and take its weight over."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.extra = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.weight) * self.extra


def check_late() -> None:
    records: list[str] = []
    logger = logging.getLogger("ds_zero")
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    engine = gathered_engine(3, max_reuse_distance=0)
    step(engine)
    module = engine.module
    module.a = Wrapper(module.a.weight)
    before = weights(engine)
    for _ in range(2):
        step(engine, 1)
        unused_are_sharded(engine)
    after = weights(engine)
    assert not torch.equal(before["a.weight"], after["a.weight"])
    assert torch.equal(module.a.extra, torch.ones(D))
    assert [r for r in records if "added to the model after initialize" in r] == [
        "parameters added to the model after initialize are not trained, and each rank has its "
        "own: a.extra; "
        "add modules before initialize to train them"
    ]
    logger.removeHandler(handler)
    engine.destroy()
    assert module.a.weight.shape == (D, D)


def test_modules_attached_late() -> None:
    run_ranks(2, check_late)
