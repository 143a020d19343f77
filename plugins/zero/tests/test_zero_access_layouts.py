"""States that ranks have in different ways: a rank's own range, mesh axes, full tensors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ds_access.states import locate
from ds_testing import run_ranks
from ds_testing.models import Case
from torch import nn

from plugins.zero.tests.access_truth import (
    CASES,
    STAGES,
    WORLDS,
    Truth,
    accessed,
    backward,
    check_grads,
    far,
    net,
    new_value,
)


def locals_of(stage: int) -> list[str]:
    """Stage 3: the ranks' fragments make the full tensor, and setting one changes those elements
    alone.
    """
    import ds_access as access

    case = CASES["bf16"]
    engine = accessed(case, stage)
    backward(engine, case, 0, 0)
    engine.step()
    backward(engine, case, 1, 0)
    wrong = check_local_tensors(engine)
    check_local_states(engine)
    engine.step()
    weight = engine.module.inp.weight
    assert access.safe_get_local_grad(weight) is None
    with pytest.raises(RuntimeError, match="no reduced gradient now"):
        access.safe_set_local_grad(weight, access.safe_get_local_fp32_param(weight) * 0)
    engine.destroy()
    return wrong


def check_local_tensors(engine: Any) -> list[str]:
    """What is wrong with the ranks' fragments of gradients and masters."""
    import ds_access as access

    from ds_core import comm

    wrong = []
    getters: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
        "grad": (access.safe_get_local_grad, access.safe_get_full_grad, access.safe_set_local_grad),
        "master": (
            access.safe_get_local_fp32_param,
            access.safe_get_full_fp32_param,
            access.safe_set_local_fp32_param,
        ),
    }
    for (n, p), (what, (local, full, put)) in itertools.product(
        engine.module.named_parameters(), getters.items()
    ):
        fragment = local(p)
        size = fragment.numel()
        everyone = comm.all_gather_json([fragment.double().tolist(), size])
        if [v for e in everyone for v in e[0]] != full(p).double().flatten().tolist():
            wrong.append(f"{n} {what}: the fragments do not make the full tensor")
        with pytest.raises(RuntimeError, match=rf"holds {size} elements.*has {size + 1} "):
            put(p, torch.zeros(size + 1))
        if what == "master" and p.numel() and comm.world_size() > 1:
            with pytest.raises(RuntimeError, match="whole on every rank"):
                put(p, fragment)
            continue
        put(p, torch.full_like(fragment, comm.rank() + 1.0))
        expected = [float(r + 1) for r, e in enumerate(everyone) for _ in range(e[1])]
        if full(p).double().flatten().tolist() != expected:
            wrong.append(f"{n} {what}: not what was set")
    return wrong


def check_local_states(engine: Any) -> None:
    """Optimizer states of this rank's fragments, of which some are empty."""
    import ds_access as access

    from ds_core import comm

    for n, p in engine.module.named_parameters():
        size = access.safe_get_local_fp32_param(p).numel()
        with pytest.raises(ValueError, match="has no optimizer state 'nothing'"):
            access.safe_get_local_optimizer_state(p, "nothing")
        if size == 0:  # what the others do must be possible here
            for key in ("exp_avg", "step"):
                assert access.safe_get_local_optimizer_state(p, key).shape == (0,)
            access.safe_set_local_optimizer_state(p, torch.empty(0), "exp_avg")
            access.safe_set_local_optimizer_state(p, torch.tensor(5.0), "step")
            with pytest.raises(RuntimeError, match="elements"):
                access.safe_set_local_optimizer_state(p, torch.zeros(2), "exp_avg")
        else:
            moment = access.safe_get_local_optimizer_state(p, "exp_avg")
            assert moment.shape == (size,)
            access.safe_set_local_optimizer_state(p, moment * 2, "exp_avg")
            assert torch.equal(access.safe_get_local_optimizer_state(p, "exp_avg"), moment * 2)
            assert access.safe_get_local_optimizer_state(p, "step").item() == 1
            access.safe_set_local_optimizer_state(p, torch.tensor(5.0), "step")
            with pytest.raises(ValueError, match="there are 'exp_avg', 'exp_avg_sq', 'step'"):
                access.safe_get_local_optimizer_state(p, "nothing")
            with pytest.raises(RuntimeError, match="elements"):
                access.safe_set_local_optimizer_state(p, torch.zeros(size + 1), "exp_avg")
        assert access.safe_get_full_optimizer_state(p, "step").item() == (
            5 if size or comm.world_size() > 1 else 1
        ), n


@pytest.mark.parametrize("world", WORLDS)
def test_local_pieces(world: int) -> None:
    assert run_ranks(world, locals_of, 3) == [[]] * world


def axes(stage: int) -> list[str]:
    """Parameters that ranks hold differently: each rank reads and writes its own."""
    import ds_access as access
    from ds_testing.truth import whole_weights

    import ds_core
    from ds_core import comm

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
        "gradient_clipping": 0,
        "fake_axes": {"axes": {"ep": 2}},
        "plugins": {"load": ["fake_axes=ds_testing.kits.parallel.fake_axes"]},
    }
    if stage:
        config["zero_optimization"] = {"stage": stage, "param_persistence_threshold": 4}
    torch.manual_seed(comm.rank() % 2)
    model = nn.ModuleDict({n: nn.Linear(5, 3) for n in ("everywhere", "held_ep")}).double()
    engine, *_ = ds_core.initialize(model=model, config=config)
    x = torch.ones(2, 5, dtype=torch.float64) * (comm.rank() + 1)
    engine.backward(sum(model[n](x).sum() for n in model))
    wrong = []
    expert = engine.ctx.params[model["held_ep"].weight].replicas
    ranks = engine.ctx.mesh.ranks(*expert)
    for n, of in (("everywhere", range(comm.world_size())), ("held_ep", ranks)):
        grad = access.safe_get_full_grad(model[n].weight)
        expected = sum(2 * (r + 1) for r in of) / comm.world_size()
        if grad is None or not torch.allclose(grad, torch.full_like(grad, expected), atol=1e-12):
            wrong.append(f"{n}: {grad} is not {expected}")
        access.safe_set_full_grad(model[n].weight, torch.full((3, 5), 0.5, dtype=torch.float64))
        access.safe_set_full_fp32_param(
            model[n].weight, torch.full((3, 5), float(min(of)), dtype=torch.float64)
        )
    engine.step()
    for n, of in (("everywhere", range(comm.world_size())), ("held_ep", ranks)):
        found = whole_weights(engine)[f"{n}.weight"]
        decayed = (
            min(of) * (1 - 0.02 * 0.01)
            if engine.optimizer.param_groups[0]["weight_decay"]
            else min(of)
        )
        if not torch.allclose(found, torch.full_like(found, decayed - 0.02), atol=1e-6):
            wrong.append(f"{n}: {found}")
    engine.destroy()
    return wrong


@pytest.mark.fast_cases("0-4", "1-2", "2-4", "3-2")
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_held_on_an_axis(stage: int, world: int) -> None:
    assert run_ranks(world, axes, stage) == [[]] * world


def check_local_master(engine: Any, param: nn.Parameter, numel: int) -> None:
    """A master is full on its owner, and cannot be set where the weight's range is another one."""
    import ds_access as access

    mine = access.safe_get_local_fp32_param(param)
    assert mine is not None
    assert mine.numel() in (0, numel)
    held = locate(engine, param)
    # Its owner has the weight whole, too.
    if held.local and held.ranges == held.updated_ranges:
        return
    with pytest.raises(RuntimeError, match=r"whole on (one|every) rank"):
        access.safe_set_local_fp32_param(param, mine)


def whole_tensors(stage: int) -> dict[str, float]:
    """Adafactor updates whole tensors, on one rank each, and keeps states of rows and of
    columns."""
    import ds_access as access

    import ds_core
    from ds_core import comm

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_clipping": 0,
        "optimizer": {"type": "Adafactor", "params": {"lr": 0.05}},
    }
    if stage:
        small = {"reduce_bucket_size": 100, "param_persistence_threshold": 6}
        config["zero_optimization"] = {"stage": stage, **small}
    case = Case()
    truth = Truth(case, comm.world_size())
    truth.optimizer = torch.optim.Adafactor(list(truth.masters.values()), lr=0.05)
    engine, *_ = ds_core.initialize(model=net(case, seed=comm.rank()), config=config)
    errors: dict[str, float] = {}
    for step in range(3):
        backward(engine, case, step, 0)
        truth.backward(step, 0)
        check_grads(errors, engine, truth, str(step))
        for n, p in engine.module.named_parameters():
            if step == 1:
                value = new_value(n, "grad", truth.params[n])
                access.safe_set_full_grad(p, value)
                truth.params[n].grad = value
        engine.step()
        truth.step()
        for n, p in engine.module.named_parameters():
            for key, old in truth.state(n).items():
                found = access.safe_get_full_optimizer_state(p, key)
                assert found is not None
                errors[f"{n} {key} {step}"] = far(found, old)
                if step == 0:
                    value = old + 2 if key == "step" else new_value(n, key, old)
                    access.safe_set_full_optimizer_state(p, value, key)
                    old.copy_(value)
            master = access.safe_get_full_fp32_param(p)
            assert master is not None
            errors[f"{n} master {step}"] = far(master, truth.masters[n].detach())
            value = new_value(n, "master", truth.masters[n].detach())
            access.safe_set_full_fp32_param(p, value)
            truth.masters[n].data.copy_(value)
            if stage == 3 and comm.world_size() > 1:
                check_local_master(engine, p, value.numel())
        if stage == 3:
            engine.offload_states()
            engine.reload_states()
    engine.destroy()
    return errors


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_optimizers_of_whole_tensors(stage: int, world: int) -> None:
    for errors in run_ranks(world, whole_tensors, stage):
        assert {k: v for k, v in errors.items() if v > 1e-12} == {}
