"""Gradients of single parameters: between backwards, in their dtype, and all in one pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch import nn

from plugins.zero.tests.access_truth import (
    CASES,
    STAGES,
    Truth,
    accessed,
    backward,
    check_grads,
    check_states,
)


def held_back(stage: int) -> dict[str, float]:
    """Gradients inside no_sync and coalesce_grad_reduction are those of the backwards so far, and
    may be set.
    """
    import ds_access as access

    from ds_core import comm

    case = replace(CASES["fp64"], gas=1)
    engine = accessed(case, stage)
    truth = Truth(case, comm.world_size())
    errors: dict[str, float] = {}
    weight = engine.module.inp.weight
    with engine.coalesce_grad_reduction():
        backward(engine, case, 0, 0)
        truth.backward(0, 0)
        check_grads(errors, engine, truth, "coalesced")
        value = torch.full((13, 7), 0.25, dtype=torch.float64)
        access.safe_set_full_grad(weight, value)
        truth.params["inp.weight"].grad = value.clone()
        check_grads(errors, engine, truth, "set")
        backward(engine, case, 0, 1)
        truth.backward(0, 1)
        check_grads(errors, engine, truth, "twice")
    check_grads(errors, engine, truth, "reduced")
    backward(engine, case, 0, 2)
    truth.backward(0, 2)
    check_grads(errors, engine, truth, "third")
    engine.step()
    truth.step()
    if stage < 2:
        with engine.no_sync():
            backward(engine, case, 1, 0)
            truth.backward(1, 0)
            check_grads(errors, engine, truth, "no_sync")
        backward(engine, case, 1, 1)
        truth.backward(1, 1)
        check_grads(errors, engine, truth, "after no_sync")
        engine.step()
        truth.step()
    check_states(errors, engine, truth)
    engine.destroy()
    return errors


@pytest.mark.fast_cases("0-1", "1-4", "2-1", "3-4")
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_that_are_held_back(stage: int, world: int) -> None:
    for errors in run_ranks(world, held_back, stage):
        assert max(errors.values()) < 1e-12, errors


def accumulation(stage: int) -> tuple[torch.dtype, float]:
    import ds_access as access

    import ds_core
    from ds_core import comm

    model = nn.Linear(7, 5)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "gradient_clipping": 0,
    }
    if stage:
        config["zero_optimization"] = {"stage": stage, "param_persistence_threshold": 0}
    engine, *_ = ds_core.initialize(model=model, config=config)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 7, dtype=torch.bfloat16) * comm.rank()).float().sum())
        grad = access.safe_get_full_grad(model.weight)
        assert grad is not None
        if engine.is_gradient_accumulation_boundary():
            before = access.safe_get_full_fp32_param(model.weight)
            assert before is not None
            exact = torch.full_like(grad, 1 + 2**-15)  # bf16 could not hold it
            access.safe_set_full_grad(model.weight, exact)
        engine.step()
    after = access.safe_get_full_fp32_param(model.weight)
    assert after is not None
    engine.destroy()
    return grad.dtype, float((before - after - exact).abs().max())


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_have_the_accumulation_dtype(stage: int) -> None:
    for dtype, error in run_ranks(2, accumulation, stage):
        assert dtype == torch.float32
        assert error < 2**-20


def vectorized_messages(stage: int) -> tuple[int, bool]:
    """Broadcasts for one pass over all parameters."""
    import ds_access as access
    from ds_access import unshard as put

    from ds_core import comm

    engine = accessed(CASES["fp64"], stage)
    backward(engine, CASES["fp64"], 0, 0)
    backward_args = list(engine.module.parameters())
    one_by_one = [access.safe_get_full_grad(p) for p in backward_args]
    seen: list[Any] = []
    count = 0
    original = comm.broadcast

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        return original(*args, **kwargs)

    put.comm.broadcast = counting  # type: ignore[attr-defined]
    try:
        access.safe_update_full_grad_vectorized(
            backward_args, lambda g, p: (seen.append(g.clone()), g)[1]
        )
    finally:
        put.comm.broadcast = original  # type: ignore[attr-defined]
    same = all(torch.equal(a, b) for a, b in zip(one_by_one, seen, strict=True) if a is not None)
    engine.destroy()
    return count, same


@pytest.mark.parametrize("stage", [2, 3])
def test_the_vectorized_update_is_one_pass(stage: int) -> None:
    for count, same in run_ranks(2, vectorized_messages, stage):
        assert same
        assert count == 2  # one per owner, for six parameters
