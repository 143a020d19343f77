"""The gradient door: what a partitioner is told of each backward, whoever started it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import start
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ds_core
from ds_core.gradients import Origin

D = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(D, D, bias=False)
        self.second = nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (
            self.second(checkpoint(self.first, x.requires_grad_(), use_reentrant=True))
            .square()
            .mean()
        )


def observed(gas: int = 1, stage: int = 0) -> tuple[Any, list[str]]:
    """An engine, and the calls that its partitioner gets."""
    zero = {"stage": stage, "param_persistence_threshold": 0}
    sections = {"zero_optimization": zero} if stage else {}
    engine: Any = start(Net(), micro=1, gas=gas, clip=1.0, **sections)
    calls: list[str] = []
    names = {param: name.partition(".")[0] for name, param in engine.module.named_parameters()}
    partitioner = engine.partitioner
    hooks = engine.partitioner.gradient_hooks
    begin = partitioner.begin
    on_gradient = partitioner.on_gradient
    finish = partitioner.finish

    def noted(text: str, call: Any, *args: Any) -> None:
        calls.append(text)
        call(*args)

    partitioner.begin = lambda plan: noted(f"begin {plan.changed}", begin, plan)
    partitioner.on_gradient = lambda p: noted(
        f"{names[p]} {Origin(hooks.origin).name}", on_gradient, p
    )
    partitioner.finish = lambda plan: noted("finish", finish, plan)
    return engine, calls


def told(stage: int) -> list[list[str]]:
    """Of a backward of the engine's, a plain one, and a joint one of two engines."""
    (a, calls), (b, others) = observed(stage=stage), observed(stage=stage)
    x = torch.ones(1, D)
    found = []
    for backward in (
        lambda: a.backward(a(x)),
        lambda: a(x).backward(),
        lambda: b.backward(a(x) + b(x)),
    ):
        calls.clear()
        others.clear()
        backward()
        found.append(calls.copy())
        for engine in (a, b):
            engine.zero_grad()
    joint = others.copy()
    a.destroy()
    b.destroy()
    return [*found, joint]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_begin_and_finish_surround_every_backward(stage: int) -> None:
    for engine, plain, joint, driver in run_ranks(2, told, stage):
        assert engine == ["begin True", "second ENGINE", "first ENGINE", "finish"]
        assert plain == ["begin False", "second PLAIN", "first PLAIN", "finish"]
        assert joint == ["begin False", "second JOINT", "first JOINT", "finish"]
        assert driver == ["begin True", "second ENGINE", "first ENGINE", "finish"]


@pytest.mark.usefixtures("clean_ds")
def test_hooks_are_installed_only_where_somebody_needs_them() -> None:
    def count() -> int:
        return sum(len(p._post_accumulate_grad_hooks or ()) for p in engine.module.parameters())

    engine, calls = observed()
    assert count() == 0
    engine(torch.ones(1, D)).backward()
    assert calls == []
    engine.zero_grad()
    engine.set_train_batch_size(2)  # accumulation: whose backward it was decides who divides
    assert count() == 2
    engine(torch.ones(1, D)).backward()
    assert calls == ["begin True", "finish"]
    assert engine.partitioner.gradient_hooks.window.seen == Origin.PLAIN
    engine.destroy()
    assert count() == 0


@pytest.mark.usefixtures("clean_ds")
def test_a_parameter_that_is_unfrozen_is_told_before_the_next_backward() -> None:
    engine, calls = observed(gas=2)
    engine.module.first.requires_grad_(False)
    for expected in ("begin True", "begin False", "begin True", "begin False"):
        calls.clear()
        engine.backward(engine(torch.ones(1, D)))
        engine.step()
        assert calls[0] == expected
        if engine.global_steps == 1:
            engine.module.first.requires_grad_(True)


@pytest.mark.usefixtures("clean_ds")
def test_a_backward_that_failed_does_not_hide_the_next() -> None:
    engine, _ = observed(gas=2)
    hidden = engine.module.first(torch.ones(1, D))
    loss = engine.module.second(hidden).sum()

    def fail(grad: Tensor) -> None:
        raise ValueError("in backward")

    hidden.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        loss.backward()
    hooks = engine.partitioner.gradient_hooks
    assert hooks.origin is Origin.PLAIN
    engine.zero_grad()
    assert hooks.origin is Origin.NONE
    engine.backward(engine(torch.ones(1, D)))
    assert hooks.window.seen == Origin.ENGINE


def _thaws_all() -> float:
    """How far two ranks are from the average, where every parameter was frozen at the start."""
    from ds_core import comm

    torch.manual_seed(0)
    net = nn.Linear(3, 1, bias=False).double().requires_grad_(False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD"},
    }
    engine, *_ = ds_core.initialize(
        model=net, model_parameters=list(net.parameters()), config=config
    )
    net.requires_grad_(True)
    engine.backward(engine(torch.eye(3, dtype=torch.float64)[comm.rank()]).sum())
    grad = net.weight.grad
    assert grad is not None
    engine.destroy()
    return (grad - torch.tensor([[0.5, 0.5, 0.0]])).abs().max().item()


def test_where_all_was_frozen_what_is_unfrozen_is_reduced() -> None:
    assert run_ranks(2, _thaws_all) == [0.0, 0.0]
