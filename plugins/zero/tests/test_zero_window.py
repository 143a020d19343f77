"""The window of accumulation at every stage: what `zero_grad` drops, how coalesced reduction adds;
autocast's dtype.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import start
from torch import Tensor, nn

STAGES = (0, 1, 2, 3)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))


def engine_at(stage: int, gas: int = 1, **more: Any) -> Any:
    zero = {"stage": stage, "param_persistence_threshold": 0, "reduce_bucket_size": 100}
    plugins = {"load": ["ds_zero.plugin"]}
    return start(model(), gas=gas, **{"zero_optimization": zero, "plugins": plugins, **more})


def data(n: int) -> list[Tensor]:
    from ds_core import comm

    return list(torch.randn(n, 2, 8, generator=torch.Generator().manual_seed(1 + comm.rank())))


def weights(engine: Any) -> list[Tensor]:
    """The engine's weights; it is destroyed."""
    module = engine.module
    engine.destroy()
    return [p.detach().clone() for p in module.parameters()]


def dropped(bf16: bool) -> list[str]:
    """Stages and calls after which a gradient was left."""
    from ds_access import safe_get_full_grad

    left = []
    more: dict[str, Any] = (
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}} if bf16 else {}
    )
    for stage in STAGES:
        norms: dict[str, float | None] = {}
        for how in ("nothing", "optimizer", "module", "engine"):
            engine = engine_at(stage, 2, **more)
            dtype = torch.bfloat16 if bf16 else torch.float32
            first, *window = [x.to(dtype) for x in data(3)]
            if how != "nothing":  # a batch that is not wanted, in front of the window
                engine.backward(engine(first).float().square().mean())
                target = engine if how == "engine" else getattr(engine, how)
                target.zero_grad()
                if safe_get_full_grad(engine.module[0].weight) is not None:
                    left.append(f"{stage} {how}: a gradient")
            for x in window:
                engine.backward(engine(x).float().square().mean())
                engine.step()
            norms[how] = engine.get_global_grad_norm()
            engine.destroy()
        left += [
            f"{stage} {how}: norm {norm}" for how, norm in norms.items() if norm != norms["nothing"]
        ]
    return left


@pytest.mark.fast_cases("2-True")
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("world", [1, 2])
def test_zero_grad_of_optimizer_and_module_drops_gradients(world: int, bf16: bool) -> None:
    assert run_ranks(world, dropped, bf16) == [[]] * world


def read_and_set(stage: int) -> list[Tensor]:
    """What the access functions give after each kind of backward in the middle of a window, and the
    weights then.
    """
    from ds_access import (
        safe_get_full_grad,
        safe_get_local_grad,
        safe_set_full_grad,
        safe_set_local_grad,
    )

    found = []
    for how in ("engine", "plain"):
        engine = engine_at(stage, 2)
        weight = engine.module[0].weight
        bias = engine.module[0].bias
        other = engine.module[2].weight
        for x in data(2):
            loss = engine(x).square().mean()
            engine.backward(loss) if how == "engine" else loss.backward()
            grad = safe_get_full_grad(weight)
            assert grad is not None
            found.append(grad)
            safe_set_full_grad(bias, torch.ones(16))
            held = safe_get_local_grad(other) if stage == 3 else None
            if held is not None:
                found.append(held)
                safe_set_local_grad(other, held * 2)
            engine.step()
        found += weights(engine)
    return found


@pytest.mark.fast_cases("2")
@pytest.mark.parametrize("world", [1, 2])
def test_both_kinds_of_backward_give_the_same_gradients(world: int) -> None:
    for stage in STAGES:
        for found in run_ranks(world, read_and_set, stage):
            half = len(found) // 2
            for a, b in zip(found[:half], found[half:], strict=True):
                assert torch.equal(a, b), stage  # a division by 2 is exact


def ends(stage: int) -> list[str]:
    import ds_core
    from ds_core.errors import UsageError

    engine = engine_at(stage)
    net = engine.module
    before = [x.shape for x in model().parameters()]
    engine.backward(engine(data(1)[0]).square().mean())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    second = ds_core.initialize(
        model=net, config={**config, "zero_optimization": {"stage": stage}}
    )[0]
    told = []
    for use in (
        lambda: engine(data(1)[0]),
        lambda: engine.step(),
        lambda: engine.backward(second(data(1)[0]).sum()),
    ):
        with pytest.raises(UsageError) as caught:
            use()
        told.append(str(caught.value))
    second.backward(second(data(1)[0]).square().mean())
    second.step()
    second.destroy()
    assert [p.shape for p in net.parameters()] == before
    told.append(str(float(sum(p.double().sum() for p in net.parameters()))))
    return told


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_that_was_replaced_neither_drifts_nor_loses_weights(stage: int) -> None:
    first, second = run_ranks(2, ends, stage)
    assert first == second
    assert all("this engine was destroyed" in text for text in first[:-1])


def coalesced(world: int) -> list[str]:
    """Stages at which one reduction of several backwards is not that of stage 1's window, bit for
    bit.
    """
    found = []
    wanted: dict[str, list[Tensor]] = {}
    for stage in (1, 2, 3):
        for how in ("window", "coalesced"):
            if how == "window" and stage > 1:
                continue
            engine = engine_at(stage, 4 if how == "window" else 1)
            for _ in range(2):
                if how == "window":
                    for x in data(4):
                        engine.backward(engine(x).square().mean())
                        engine.step()
                    continue
                with engine.coalesce_grad_reduction():
                    for x in data(4):
                        engine.backward(engine(x).square().mean() / 4)
                engine.step()
            got = weights(engine)
            if not all(
                torch.equal(a, b)
                for a, b in zip(got, wanted.setdefault("window", got), strict=True)
            ):
                found.append(f"stage {stage} {how}")
    return found


def test_coalesced_reduction_adds_as_a_window_of_stage_1() -> None:
    assert run_ranks(2, coalesced, 2) == [[], []]


def gathered(by_all_reduce: bool) -> tuple[list[int], bool, bool]:
    """Bytes of weights in one forward with and without listed modules; equal outputs; exact for who
    looks.
    """
    import ds_zero

    from ds_core import comm

    sizes: list[int] = []
    outputs = []
    exact = True
    for listed in (None, []):
        auto = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": listed}
        if listed is None:
            del auto["lower_precision_safe_modules"]
        zero = {"stage": 3, "param_persistence_threshold": 0, "reduce_bucket_size": 100}
        zero["stage3_use_all_reduce_for_fetch_params"] = by_all_reduce
        engine = engine_at(3, torch_autocast=auto, zero_optimization=zero)
        sent = 0
        real = comm.all_reduce if by_all_reduce else comm.all_gather_into_tensor

        def count(out: Tensor, *rest: Any, **named: Any) -> Any:
            nonlocal sent
            sent += out.numel() * out.element_size()
            return real(out, *rest, **named)  # noqa: B023

        name = "all_reduce" if by_all_reduce else "all_gather_into_tensor"
        setattr(comm, name, count)
        try:
            with torch.no_grad():
                engine(data(1)[0])
        finally:
            setattr(comm, name, real)
        sizes.append(sent)
        out = engine(data(1)[0])  # weights stay gathered for its backward, rounded
        with ds_zero.GatheredParameters(engine.module):
            exact &= all(
                torch.equal(p, q.to(p.device))
                for p, q in zip(engine.module.parameters(), model().parameters(), strict=True)
            )
        engine.backward(out.float().square().mean())
        engine.step()
        engine(data(1)[0])  # and are not rounded for good when the engine goes
        exact &= all(not torch.equal(w, w.bfloat16().float()) for w in weights(engine))
        outputs.append(out.detach())
    return sizes, torch.equal(*outputs), exact


@pytest.mark.parametrize("by_all_reduce", [False, True])
def test_under_autocast_stage_3_gathers_in_its_dtype(by_all_reduce: bool) -> None:
    for sizes, equal, exact in run_ranks(2, gathered, by_all_reduce):
        assert sizes[0] * 2 == sizes[1] > 0
        assert equal
        assert exact
