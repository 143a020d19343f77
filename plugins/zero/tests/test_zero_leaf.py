"""Leaf modules set by hand and by config: found, refused, and gathered whole when ranks run
different parts.
"""

from __future__ import annotations

from typing import Any

import ds_zero
import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import plain, same, start, train, whole_weights
from torch import Tensor, nn

from ds_core.errors import UsageError

D = 6


class Experts(nn.Module):
    """Each rank runs another part."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.parts[which](x)


class Special(Experts):
    pass


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(D, D)
        self.moe = Special()
        self.other = Experts()

    def forward(self, x: Tensor, which: int) -> Any:
        return self.other(torch.tanh(self.moe(torch.tanh(self.inp(x)), which)), 1 - which)


def test_finding_and_taking_back() -> None:
    net = Net()
    assert ds_zero.set_z3_leaf_modules(net, [Experts]) == [net.moe, net.other]
    assert ds_zero.get_z3_leaf_modules(net) == [net.moe, net.other]
    assert ds_zero.z3_leaf_module(net.moe) and not ds_zero.z3_leaf_module(net.moe.parts[0])
    assert ds_zero.z3_leaf_parameter(net.moe.parts[0].weight) and not ds_zero.z3_leaf_parameter(
        net.inp.weight
    )
    assert ds_zero.unset_z3_leaf_modules(net, ["Special"]) == [net.moe]
    assert ds_zero.get_z3_leaf_modules(net) == [net.other]
    assert not ds_zero.z3_leaf_parameter(net.moe.parts[0].weight)
    ds_zero.set_z3_leaf_module(net.other, False)
    assert ds_zero.get_z3_leaf_modules(net) == []
    assert ds_zero.set_z3_leaf_modules(net, [f"{__name__}.Special"]) == [net.moe]
    assert ds_zero.set_z3_leaf_modules_by_name(net, ["other", "inp", "other"]) == (
        [net.inp, net.other],
        [],
    )
    assert ds_zero.set_z3_leaf_modules_by_suffix(net, ["parts.1"]) == (
        [net.moe.parts[1], net.other.parts[1]],
        [],
    )
    assert ds_zero.set_z3_leaf_modules_by_name(net, ["gone"], raise_if_not_found=False) == (
        [],
        ["gone"],
    )
    assert ds_zero.set_z3_leaf_modules(net, ["Gone"], raise_if_not_found=False) == []


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (
            lambda net: ds_zero.set_z3_leaf_modules(net, [nn.Conv1d]),
            ValueError,
            "has the class Conv1d",
        ),
        (
            lambda net: ds_zero.set_z3_leaf_modules(net, ["Expert"]),
            ValueError,
            "Expert; did you mean Experts?",
        ),
        (
            lambda net: ds_zero.set_z3_leaf_modules(net, [3]),
            TypeError,
            "by module classes or class names, not 3",
        ),
        (lambda net: ds_zero.set_z3_leaf_modules(net, [int]), TypeError, "not <class 'int'>"),
        (
            lambda net: ds_zero.set_z3_leaf_modules_by_name(net, ["mo"]),
            ValueError,
            "name mo; did you mean 'moe'?",
        ),
        (
            lambda net: ds_zero.set_z3_leaf_modules_by_name(net, [nn.Linear]),
            TypeError,
            "named by strings here",
        ),
        (
            lambda net: ds_zero.set_z3_leaf_modules_by_suffix(net, "x9"),
            ValueError,
            "name that ends with x9",
        ),
        (
            lambda net: ds_zero.unset_z3_leaf_modules(net, [nn.Conv1d]),
            ValueError,
            "has the class Conv1d",
        ),
    ],
)
def test_mistakes(call: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        call(Net())


def check_config_leaves() -> None:
    net = Net()
    engine = engine_with_leaves(net, classes=["Special"], names=["other"])
    assert ds_zero.get_z3_leaf_modules(net) == [net.moe, net.other]
    assert ds_zero.z3_leaf_parameter(net.moe.parts[0].weight) and not ds_zero.z3_leaf_parameter(
        net.inp.weight
    )
    engine.destroy()
    assert ds_zero.get_z3_leaf_modules(net) == []


@pytest.mark.parametrize("world", [1, 2])
def test_leaves_of_the_config_are_told(world: int) -> None:
    run_ranks(world, check_config_leaves)


def engine_with_leaves(model: nn.Module, **leaf: Any) -> Any:
    zero = {"stage": 3, "param_persistence_threshold": 0, "leaf_module": leaf}
    return start(model, micro=4, zero_optimization=zero)


def leaves_by_api_and_config(early: bool) -> None:
    """Both containers are leaves, one by the API and one by the config; ranks take different ways
    through them.
    """
    torch.manual_seed(0)
    wanted = Net()
    torch.manual_seed(0)
    with ds_zero.Init(enabled=early):
        model = Net()
    ds_zero.set_z3_leaf_modules(model, [Special])
    engine = engine_with_leaves(model, names="other")
    assert ds_zero.get_z3_leaf_modules(model) == [model.moe, model.other]
    assert ds_zero.z3_leaf_parameter(model.other.parts[0].weight)
    assert [u.leaf for u in engine.partitioner.units] == [False, True, True]

    def batch(step: int, rank: int) -> tuple[Tensor, int]:
        data = torch.randn(2, 4, D, generator=torch.Generator().manual_seed(step))
        return data[rank], rank

    losses = train(engine, batch)
    same(losses, plain(wanted, batch, count=2), 1e-6)
    same(whole_weights(engine), wanted, 1e-6)
    with pytest.raises(UsageError, match="leaf modules must be set before initialize"):
        ds_zero.set_z3_leaf_modules(model, [Net])
    engine.destroy()
    assert ds_zero.get_z3_leaf_modules(model) == [model.moe]

    # What was said by hand goes before what the config says.
    ds_zero.set_z3_leaf_module(model.moe, False)
    engine = engine_with_leaves(model, classes=["Experts"])
    assert ds_zero.get_z3_leaf_modules(model) == [model.other]
    engine.destroy()


@pytest.mark.parametrize("early", [False, True])
def test_leaves_are_gathered_whole(early: bool) -> None:
    run_ranks(2, leaves_by_api_and_config, early)
