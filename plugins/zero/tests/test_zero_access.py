"""States of single parameters, read and written while training; the truth is plain torch in one
process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.models import micro_batch

from plugins.zero.tests.access_truth import (
    CASES,
    LOW,
    STAGES,
    WORLDS,
    Truth,
    accessed,
    backward,
    check_grads,
    check_states,
    net,
    new_value,
    tolerance,
)


def read(stage: int, name: str, *place: str) -> dict[str, float]:
    import ds_access as access

    from ds_core import comm

    case = CASES[name]
    truth = Truth(case, comm.world_size())
    engine = accessed(case, stage, *place)
    errors: dict[str, float] = {}
    check_states(errors, engine, truth)
    for step in range(2):
        assert all(access.safe_get_full_grad(p) is None for p in engine.module.parameters())
        for micro in range(case.gas):
            backward(engine, case, step, micro)
            truth.backward(step, micro)
            check_grads(errors, engine, truth, f"{step}.{micro}")
            engine.step()
        truth.step()
        check_states(errors, engine, truth)
    engine.destroy()
    return errors


@pytest.mark.fast_cases("0-1", "3-2")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "stage", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3]
)
def test_full_states_equal_one_process(stage: int, world: int) -> None:
    for name in CASES if world == 2 else ("fp64", "partly", "bf16"):
        case = CASES[name]
        for errors in run_ranks(world, read, stage, name):
            assert errors
            assert {k: v for k, v in errors.items() if v > tolerance(case)} == {}, name


def write(stage: int, name: str, *place: str) -> dict[str, float]:
    """Set one state after the other, in the program and in the truth, and train on."""
    import ds_access as access

    from ds_core import comm

    case = CASES[name]
    truth = Truth(case, comm.world_size())
    engine = accessed(case, stage, *place)
    params = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}

    def one(step: int, edit: Callable[[], None] | None = None, at: int = case.gas - 1) -> None:
        for micro in range(case.gas):
            backward(engine, case, step, micro)
            truth.backward(step, micro)
            if edit is not None and micro == at:
                edit()
            engine.step()
        truth.step()

    @torch.no_grad()
    def set_grads() -> None:
        for n, p in params.items():
            if "weight" in n:  # one that nobody used, too
                value = new_value(n, "grad", truth.params[n])
                access.safe_set_full_grad(p, value)
                got = access.safe_get_full_grad(p)
                assert got is not None
                assert torch.equal(got, value)
                truth.params[n].grad = value

    def update_grads() -> None:
        access.safe_update_full_grad_vectorized(
            params.values(), lambda g, p: g.clamp(-0.05, 0.05) * 0.5
        )
        for p in truth.params.values():
            if p.grad is not None:
                p.grad.copy_(p.grad.clamp(-0.05, 0.05) * 0.5)

    one(0)
    errors: dict[str, float] = {}
    set_states(truth, params)
    one(1)
    check_states(errors, engine, truth)
    one(2, set_grads, at=0)
    one(3, set_grads)
    one(4, update_grads)
    check_states(errors, engine, truth)
    norm = engine.get_global_grad_norm()
    assert norm is not None
    assert norm > 0
    engine.destroy()
    return errors


def set_states(truth: Truth, params: dict[str, Any]) -> None:
    """Set masters and optimizer states, in the program and in the truth."""
    import ds_access as access

    for n, p in params.items():
        if not truth.state(n):
            continue
        master = truth.masters[n]
        value = new_value(n, "master", master.detach())
        access.safe_set_full_fp32_param(p, value)
        master.data.copy_(value)
        got = access.safe_get_full_fp32_param(p)
        assert got is not None
        assert torch.equal(got, value)
        for key, old in truth.state(n).items():
            value = new_value(n, key, old) if old.dim() or old.shape == master.shape else old + 3
            value = old + 3 if key == "step" else value
            access.safe_set_full_optimizer_state(p, value, key)
            found = access.safe_get_full_optimizer_state(p, key)
            assert found is not None
            assert torch.equal(found, value)
            old.copy_(value)
    truth.publish()


@pytest.mark.fast_cases("3-1", "3-2")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    "stage", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3]
)
def test_what_is_set_is_what_the_step_uses(stage: int, world: int) -> None:
    for name in (
        ("fp64", "fp32 frozen", "shared", "unused", "bf16", "fp16")
        if world == 2
        else ("fp64", "bf16")
    ):
        for errors in run_ranks(world, write, stage, name):
            # Every element went through rounded gradients; Adam turns a small difference into a
            # step's length.
            limit = 0.2 if CASES[name].dtype in LOW else 20 * tolerance(CASES[name])
            assert errors
            assert {k: v for k, v in errors.items() if v > limit} == {}, name


@pytest.mark.fast_cases("3-disk")
@pytest.mark.parametrize(("stage", "place"), [(1, "cpu"), (2, "disk"), (3, "cpu"), (3, "disk")])
def test_wherever_states_rest(stage: int, place: str, tmp_path: Any) -> None:
    for what, name in itertools.product((read, write), ("fp64", "bf16")):
        for errors in run_ranks(2, what, stage, name, place, str(tmp_path)):
            limit = 0.2 if what is write and name == "bf16" else 20 * tolerance(CASES[name])
            assert {k: v for k, v in errors.items() if v > limit} == {}, name


def rounds(stage: int, name: str) -> list[str]:
    """After a master is set, all ranks have the same 16-bit weight: `value` rounded, even if they
    differed in it.
    """
    import ds_access as access
    from ds_testing.truth import whole_weights

    from ds_core import comm

    case = CASES[name]
    engine = accessed(case, stage)
    batch = micro_batch(case, 0, 0, comm.rank())
    engine(**batch)  # stage 3 keeps what it has gathered for backward
    wrong = []
    for n, p in engine.module.named_parameters():
        old = access.safe_get_full_fp32_param(p)
        assert old is not None
        access.safe_set_full_fp32_param(p, new_value(n, "x", old) + comm.rank())
        now = access.safe_get_full_fp32_param(p)
        assert now is not None
        everyone = now.new_empty(comm.world_size(), *now.shape)
        comm.all_gather_into_tensor(everyone, now)
        if not all(torch.equal(e, now) for e in everyone):
            wrong.append(f"{n}: masters differ")
        if p.numel() and not torch.equal(p.detach(), now.to(p.dtype)):
            wrong.append(f"{n}: the weight that is whole here is not the master's")
        if not torch.equal(whole_weights(engine)[n], now.to(p.dtype)):
            wrong.append(f"{n}: the weight as it rests is not the master's")
    model = net(case).to(case.torch_dtype)
    model.load_state_dict(
        {n: w.view(model.get_parameter(n).shape) for n, w in whole_weights(engine).items()}, False
    )
    with torch.no_grad():
        if not torch.equal(engine(**batch), model(**batch)):
            wrong.append("the forward does not use it")
    engine.destroy()
    return wrong


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", STAGES)
def test_weights_follow_masters_and_ranks_agree(stage: int, world: int) -> None:
    for name in ("fp64", "bf16"):
        assert run_ranks(world, rounds, stage, name) == [[]] * world, name


def stale_graph(stage: int) -> None:
    import ds_access as access

    from ds_core import comm

    engine = accessed(CASES["fp64"], stage)
    loss = engine(**micro_batch(CASES["fp64"], 0, 0, comm.rank()))
    param = engine.module.mid.weight
    access.safe_set_full_fp32_param(param, torch.ones(13, 13, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    engine.destroy()


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_of_the_old_weight_is_refused(stage: int) -> None:
    run_ranks(1, stale_graph, stage)


def mistakes(stage: int) -> None:
    import ds_access as access

    import ds_core

    case = CASES["fp32 frozen"]
    engine = accessed(case, stage)
    weight = engine.module.inp.weight
    frozen = engine.module.mid.weight
    value = torch.zeros(13, 7)
    for call in (
        lambda: access.safe_set_full_grad(weight, value),
        lambda: access.safe_update_full_grad_vectorized([weight], lambda g, p: g),
    ):
        with pytest.raises(
            RuntimeError, match=r"after engine.backward\(loss\) and before engine.step\(\)"
        ):
            call()
    with pytest.raises(ValueError, match="before its first step"):
        access.safe_set_full_optimizer_state(weight, value, "exp_avg")
    if stage < 3:
        for local in (access.safe_get_local_fp32_param, access.safe_get_local_grad):
            with pytest.raises(RuntimeError, match="stage 3"):
                local(weight)
        with pytest.raises(RuntimeError, match="stage 3"):
            access.safe_set_local_optimizer_state(weight, value, "exp_avg")
    with pytest.raises(
        RuntimeError, match=r"shape \(13, 7\) \(91 elements\), it has \(7, 13\) \(91 elements\)"
    ):
        access.safe_set_full_fp32_param(weight, torch.zeros(7, 13))
    with pytest.raises(RuntimeError, match="no optimizer of a live engine"):
        access.safe_set_full_fp32_param(frozen, torch.zeros(13, 13))
    assert access.safe_get_full_grad(frozen) is None
    with pytest.raises(RuntimeError, match="expected a parameter"):
        access.safe_get_full_grad(value)
    backward(engine, case, 0, 0)
    with pytest.raises(RuntimeError, match="must return the new gradient"):
        access.safe_update_full_grad_vectorized([weight], lambda g, p: None)  # type: ignore[arg-type, return-value]
    weight.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'inp.weight' is frozen"):
        access.safe_set_full_grad(weight, value)
    weight.requires_grad_(True)
    engine.step()
    with pytest.raises(RuntimeError, match=r"shape \(13, 7\)"):
        access.safe_set_full_optimizer_state(weight, torch.zeros(91), "exp_avg")
    with pytest.raises(ValueError, match="there are 'exp_avg', 'exp_avg_sq', 'step'"):
        access.safe_set_full_optimizer_state(weight, value, "momentum")
    engine.destroy()
    assert access.safe_get_full_fp32_param(weight) is None
    ds_core.reset()


@pytest.mark.parametrize("stage", STAGES)
def test_mistakes_are_told(stage: int) -> None:
    run_ranks(2, mistakes, stage)
