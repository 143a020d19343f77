"""A mixed-precision step is a read for the norm and one pass of the kernel, at every stage; see
`ds_core.partition.stepping`.
"""

from __future__ import annotations

from typing import Any

import ds_ops_cpu.kernels
import pytest
import torch
from ds_access.states import locate
from ds_testing import run_ranks
from ds_testing.truth import start, train
from torch import Tensor, nn

from ds_core.kernels import Kernels

CPU = {"device": "cpu"}
ZERO: list[dict[str, Any]] = [
    *({"stage": stage} for stage in range(4)),
    {"stage": 2, "offload_optimizer": CPU},
    {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU},
]
ELEMENTWISE = ("AdamW", "Adagrad", "Lion", "SGD")


def engine_of(zero: dict[str, Any], dtype: str, optimizer: Any = "AdamW", **more: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 7), nn.LayerNorm(7))
    low: dict[str, Any] = {
        "fp32": {},
        "bf16": {"bf16": {"enabled": True}},
        "fp16": {"fp16": {"enabled": True, "loss_scale": 64}},
    }
    if isinstance(optimizer, str):
        optimizer = {"type": optimizer, "params": {"lr": 1e-2}}
    sections = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **low[dtype]}
    return start(model, micro=4, clip=0.01, optimizer=optimizer, **{**sections, **more})


def losses_of(engine: Any, steps: int = 3) -> list[float]:
    dtype = next(engine.module.parameters()).dtype
    return train(
        engine,
        lambda step, _: torch.randn(4, 12, generator=torch.Generator().manual_seed(step)).to(dtype),
        steps,
        loss=lambda model, x: model(x).float().pow(3).mean(),
        mean=False,
    )


class Ops(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the elements that torch's own operations copy or multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in func.name() for word in ("copy", "mul", "clone")):
            self.elements += sum(
                t.numel() for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)
            )
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("clean_ds")
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("zero", ZERO, ids=str)
def test_nothing_is_cast_or_scaled_beside_the_kernel(
    zero: dict[str, Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    inner = ds_ops_cpu.kernels.adam

    def adam(params: Any, grads: Any, *states: Any, **options: Any) -> None:
        seen.append(
            ({g.dtype for g in grads}, {c.dtype for c in options["copies"]}, options["scale"])
        )
        inner(params, grads, *states, **options)

    found = Kernels.get
    monkeypatch.setattr(
        Kernels, "get", lambda self, op, *rest: adam if op == "adam" else found(self, op, *rest)
    )
    engine = engine_of(zero, dtype)
    losses_of(engine, 1)
    seen.clear()
    param = next(engine.module.parameters())
    x = torch.randn(4, 12).to(param.dtype)
    engine.backward(engine(x).float().pow(3).mean())
    with Ops() as ops:
        engine.step()
    assert seen
    for grads, copies, scale in seen:
        assert grads == copies == {param.dtype}
        assert scale < (1 if dtype == "bf16" else 1 / 64)
    assert ops.elements < 100, "counters only"
    for name, weight in engine.module.named_parameters():
        held = locate(engine, weight)
        rests = weight if weight.numel() else weight.ds_tensor
        assert torch.equal(rests.reshape(-1), held.updated.detach().reshape(-1).to(weight.dtype)), (
            name
        )
    engine.destroy()


@pytest.mark.usefixtures("clean_ds")
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("optimizer", [*ELEMENTWISE, "Muon"])
@pytest.mark.parametrize("stage", [0, 2])
def test_the_one_pass_gives_the_bits_of_the_plain_way(
    stage: int, optimizer: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_optimizers.base import KernelOptimizer

    engine = engine_of({"stage": stage}, dtype, optimizer)
    assert engine.optimizer.takes_inputs
    losses = losses_of(engine)
    engine.destroy()
    monkeypatch.setattr(KernelOptimizer, "takes_inputs", False)
    engine = engine_of({"stage": stage}, dtype, optimizer)
    assert losses_of(engine) == losses
    engine.destroy()


@pytest.mark.usefixtures("clean_ds")
@pytest.mark.parametrize("zero", [{"stage": 0}, {"stage": 2}], ids=str)
def test_who_looks_at_grad_finds_it_there(zero: dict[str, Any]) -> None:
    """A subclass with a step or an update of its own, and hooks on the step, get what they always
    got.
    """
    from ds_optimizers import AdamW

    truth = losses_of(engine := engine_of(zero, "bf16", lambda groups: AdamW(groups, lr=1e-2)))
    engine.destroy()
    seen: list[Any] = []

    class OwnStep(AdamW):
        def step(self, closure: Any = None) -> Any:
            seen.append(grads(self))
            return super().step(closure)

    class OwnUpdate(AdamW):
        def update(self, group: Any, batch: Any) -> None:
            seen.append({g.dtype for g in batch.grads} | {batch.scale})
            super().update(group, batch)

    def grads(optimizer: Any) -> set[Any]:
        found = {
            p.grad.dtype for g in optimizer.param_groups for p in g["params"] if p.grad is not None
        }
        return found | {1.0}

    for cls in (OwnStep, OwnUpdate):
        engine = engine_of(zero, "bf16", lambda groups, cls=cls: cls(groups, lr=1e-2))
        assert losses_of(engine) == truth
        engine.destroy()
    engine = engine_of(zero, "bf16")
    engine.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: seen.append(grads(optimizer))
    )
    losses_of(engine)
    engine.destroy()
    assert len(seen) == 9
    assert all(s == {torch.float32, 1.0} for s in seen)


def several(zero: dict[str, Any]) -> list[list[float]]:
    found = []
    for section in (zero, {"stage": 0}):
        engine = engine_of(section, "bf16")
        found.append(losses_of(engine))
        engine.destroy()
    return found


def test_ranks_of_a_partitioned_step_equal_replicas() -> None:
    for zero in ({"stage": 1}, ZERO[-1]):
        for ours, replicas in run_ranks(2, several, zero):
            assert ours == pytest.approx(replicas, rel=1e-2)


@pytest.mark.usefixtures("clean_ds")
def test_host_gradients_are_wide_only_where_several_are_added() -> None:
    """A second backward at a boundary, which nobody announced, widens what has come; its sum is
    exact in fp32.
    """
    engine = engine_of({"stage": 2, "offload_optimizer": CPU}, "bf16")
    reducer = engine.partitioner.reducer
    x = torch.randn(4, 12, dtype=torch.bfloat16)
    engine.backward(engine(x).float().pow(3).mean())
    first = [g.shard.clone() for g in reducer._all.values()]
    assert {p.dtype for p in first} == {torch.bfloat16}
    engine.backward(engine(x).float().pow(3).mean())
    for grads, once in zip(reducer._all.values(), first, strict=True):
        assert torch.equal(grads.shard, 2 * once.float())
    engine.step()
    engine.destroy()
