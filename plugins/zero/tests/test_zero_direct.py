"""Where dp has one rank, gradients stay in ``param.grad``: the numbers are plain torch's, whatever
backward does.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import start
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ds_core.errors import UsageError

D = 6


class Net(nn.Module):
    """Sparse gradients, a shared weight in nested backwards, a weight with odd strides, an empty
    and an unused one.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(5, D, sparse=True)
        self.first = nn.Linear(D, D)
        self.second = nn.Linear(D, D)
        self.extra = nn.Linear(D, D)
        self.second.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(3, D).t())
        self.nothing = nn.Parameter(torch.empty(0))
        self.never = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        h = self.table(x)
        for layer in (self.first, self.second):
            h = checkpoint(layer, h.tanh(), use_reentrant=True)
        if extra:
            h = self.extra(h)
        return (h.tanh() @ self.turned).float().square().mean() + self.nothing.sum()


def micro_batch(number: int) -> Tensor:
    return torch.randint(0, 5, (4,), generator=torch.Generator().manual_seed(number))


def freeze(model: nn.Module, step: int) -> None:
    """What is trained changes between steps; in the second the frozen weight already has a
    gradient.
    """
    model.first.bias.requires_grad_(step != 2)  # type: ignore[union-attr, operator]


def trained_plainly() -> dict[str, Tensor]:
    model = Net()
    # as in a flat buffer; products round otherwise with strides
    model.turned.data = model.turned.data.contiguous()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, fused=True)
    for step in range(4):
        for micro in range(2):
            freeze(model, step)
            (model(micro_batch(2 * step + micro), step % 2 == 0) * 0.5).backward()
        for p in model.parameters():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.to_dense()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def trained(stage: int, how: str, config: dict[str, Any]) -> tuple[Any, str]:
    """The engine after four steps of two micro-batches, and the class that took the gradients."""
    engine = start(
        Net(),
        micro=4,
        gas=2,
        optimizer={"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
        # whose last bits are their own
        plugins={"disable": ["dscore-optimizers", "dscore-ops-cpu"]},
        zero_optimization={"stage": stage, "reduce_bucket_size": 40},
        **config,
    )
    for step in range(4):
        for micro in range(2):
            freeze(engine.module, step)
            loss = engine(micro_batch(2 * step + micro), step % 2 == 0)
            loss.backward() if how == "direct" else engine.backward(loss)
            engine.step()
    return engine, type(getattr(engine.partitioner, "reducer", None)).__name__


def compare_weights(stage: int, how: str) -> str:
    truth = trained_plainly()
    engine, reducer = trained(stage, how, {})
    for name, param in engine.module.named_parameters():
        assert torch.equal(param, truth[name]), name
        assert param.grad is None, name
    assert torch.equal(truth["never"], torch.ones(2))
    engine.destroy()
    return reducer


@pytest.mark.parametrize("how", ["manual", "direct"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bit_for_bit_as_plain_torch(stage: int, how: str) -> None:
    assert run_ranks(1, compare_weights, stage, how) == ["LocalGradients"]


def compare_masters(stage: int, config: dict[str, Any]) -> str:
    weights = []
    for number in (0, stage):
        engine, reducer = trained(number, "manual", config)
        weights.append([p.detach().clone() for p in engine.module.parameters()])
        engine.destroy()
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert all(p.dtype == torch.bfloat16 for p in weights[1])
    return reducer


@pytest.mark.parametrize(
    ("config", "reducer"),
    [
        ({"bf16": {"enabled": True}}, "LocalGradients"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}, "LocalGradients"),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, "Reducer"),
    ],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_bit_for_bit_as_stage_0(stage: int, config: dict[str, Any], reducer: str) -> None:
    assert run_ranks(1, compare_masters, stage, config) == [reducer]


def who_reduces() -> str:
    engine, reducer = trained(2, "manual", {})
    engine.destroy()
    return reducer


def test_not_where_gradients_must_be_averaged() -> None:
    assert run_ranks(2, who_reduces) == ["Reducer", "Reducer"]


def two_layers(section: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return start(
        nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)),
        micro=1,
        optimizer={"type": "SGD", "params": {"lr": 1.0}},
        zero_optimization={"stage": 2, **section},
    )


def without_copies() -> None:
    engine = two_layers({})
    engine.backward(engine(torch.ones(1, D)).sum())
    param = engine.module[0].weight
    assert param.grad is not None
    where = param.grad.data_ptr()
    given = [t.data_ptr() for group in engine.partitioner.gradients() for t in group.tensors]
    assert where in given
    engine.step()
    storages = {t.data_ptr() for t in gc.get_objects() if issubclass(type(t), Tensor)}
    assert where not in storages  # the step has let go of it
    engine.destroy()


def test_the_optimizer_sees_the_gradients_of_autograd_themselves() -> None:
    run_ranks(1, without_copies)


def written_part() -> None:
    """The step takes a gradient that somebody has written; one that is missing is told."""
    import ds_access as access

    engine = two_layers({"ignore_unused_parameters": False})
    first = engine.module[0]
    before = first.weight.detach().clone()
    bias = first.bias.detach().clone()
    engine.backward(engine(torch.ones(1, D)).sum())
    expected = {
        n: p.grad.clone() for n, p in engine.module.named_parameters() if p.grad is not None
    }
    access.safe_set_full_grad(first.weight, torch.full((D, D), 2.0))
    engine.step()
    assert torch.allclose(first.weight, before - 2.0)
    assert torch.equal(first.bias, bias - expected["0.bias"])
    now = first.weight.detach().clone()
    first.weight.requires_grad_(False)
    engine.backward(engine(torch.ones(1, D)).sum())
    engine.step()
    assert torch.equal(first.weight, now)
    first.weight.requires_grad_(True)
    with pytest.raises(UsageError, match=r"0\.weight"):
        engine.backward(engine.module[1](torch.ones(1, D)).sum())
        engine.step()
    engine.destroy()


def test_a_written_gradient_and_unused_parameters() -> None:
    run_ranks(1, written_part)


def bucket_bytes(stage: int, width: int) -> list[int]:
    """Bytes of the buckets of four layers."""
    import ds_core

    engine, *_ = ds_core.initialize(
        model=nn.Sequential(*(nn.Linear(width, width) for _ in range(4))),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            "zero_optimization": {"stage": stage, "param_persistence_threshold": 10**9},
        },
    )
    sizes = [b.full.numel() * b.full.element_size() for b in engine.partitioner.buckets]
    engine.destroy()
    return sizes


@pytest.mark.parametrize(("stage", "count"), [(1, 1), (2, 2), (3, 2)])
def test_buckets_whose_gradients_come_and_go_are_small_on_the_host(stage: int, count: int) -> None:
    """Four layers of 4 MiB and a bit: one to a bucket and its bias with the next, in 8 MiB."""
    from ds_zero.buckets.make import HOST_BYTES

    for sizes in run_ranks(2, bucket_bytes, stage, 1000):
        assert len(sizes) == count
        assert max(sizes) <= HOST_BYTES or stage == 1
