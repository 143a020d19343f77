"""offload_states: the memory is given back, everything comes back bit for bit, and nothing touches
what is away.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.models import Case, build_model, micro_batch, param_groups
from ds_testing.truth import start
from torch import Tensor, nn

WORLDS = [1, 2, pytest.param(4, marks=pytest.mark.slow)]
ALL = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")


def engine_of(case: Case, **extra: Any) -> Any:
    from ds_core import comm

    zero = {"stage": 3, "reduce_bucket_size": 100, "param_persistence_threshold": 10, **extra}
    model = build_model(case, seed=comm.rank())
    groups = param_groups(case, model)
    sections = case.config(comm.world_size())
    return start(model, model_parameters=groups, **sections, zero_optimization=zero)


def forward(engine: Any, case: Case, step: int) -> Tensor:
    from ds_core import comm

    loss: Tensor = engine(**micro_batch(case, step, 0, comm.rank()))
    return loss


def one_step(engine: Any, case: Case, step: int) -> float:
    loss = forward(engine, case, step)
    engine.backward(loss)
    engine.step()
    return loss.item()


def states(engine: Any, state: str) -> list[Tensor]:
    from ds_zero.offload.offload_states import _tensors
    from ds_zero.offload.state_offload import OffloadStateTypeEnum

    return list(_tensors(engine.partitioner, engine.optimizer, OffloadStateTypeEnum(state)))


def storages(tensors: list[Tensor]) -> int:
    found = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


def there_and_back(dtype: str, model: str, non_blocking: bool) -> dict[str, Any]:
    """Two runs, one of which moves its states out and back between any two calls; bytes and losses
    of both.
    """
    case = Case(dtype=dtype, model=model)
    still = engine_of(case)
    moving = engine_of(case)
    losses: list[tuple[float, float]] = []
    bytes_before = {}
    bytes_away = {}
    for step in range(3):
        for engine in (still, moving):
            if engine is moving and step:
                held = {s: states(engine, s) for s in ALL}
                bytes_before = {s: storages(t) for s, t in held.items()}
                values = [t.clone() for tensors in held.values() for t in tensors]
                keys = list(engine.optimizer.state)
                engine.offload_states(pin_memory=True, non_blocking=non_blocking)
                engine.offload_states()  # nothing is left to do
                bytes_away = {s: storages(t) for s, t in held.items()}
                assert all(p.numel() == 0 for p in engine.module.parameters())
                engine.reload_states(non_blocking=non_blocking)
                engine.reload_states()
                again = [t for s in ALL for t in states(engine, s)]
                same = zip(again, (t for tensors in held.values() for t in tensors), strict=True)
                assert all(a is b or a.data_ptr() == b.data_ptr() for a, b in same)
                assert all(torch.equal(a, v) for a, v in zip(again, values, strict=True))
                assert all(a is b for a, b in zip(engine.optimizer.state, keys, strict=True))
        losses.append((one_step(still, case, step), one_step(moving, case, step)))
    from ds_testing.truth import whole_weights

    a = whole_weights(still)
    b = whole_weights(moving)
    equal = all(torch.equal(a[n], b[n]) for n in a)
    for engine in (still, moving):
        engine.destroy()
    return {"before": bytes_before, "away": bytes_away, "losses": losses, "equal": equal}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("dtype", "model"), [("bfloat16", "frozen"), ("float64", "shared")])
def test_memory_is_given_back_and_training_goes_on_bit_equal(
    dtype: str, model: str, world: int
) -> None:
    for found in run_ranks(world, there_and_back, dtype, model, world == 2):
        assert found["away"] == dict.fromkeys(ALL, 0)
        assert all(found["before"][s] > 0 for s in ALL[:3])
        assert found["equal"]
        assert all(a == b for a, b in found["losses"])


def with_gradients() -> list[tuple[float, float]]:
    """Between backward and step, and in the middle of a window."""
    case = Case(dtype="bfloat16", gas=2)
    still = engine_of(case)
    moving = engine_of(case)
    losses = []
    for step in range(2):
        for micro in range(2):
            for engine in (still, moving):
                engine.backward(forward(engine, case, 10 * step + micro))
            grads = states(moving, "lp_grads")
            assert storages(grads) > 0
            moving.offload_states(include=["lp_grads"])
            assert storages(grads) == 0
            with pytest.raises(RuntimeError, match=r"lp_grads.*reload_states"):
                forward(moving, case, 5)
            with torch.no_grad():
                forward(moving, case, 5)
            moving.reload_states()
            still.step()
            moving.step()
        losses.append((forward(still, case, 99).item(), forward(moving, case, 99).item()))
    for engine in (still, moving):
        engine.destroy()
    return losses


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_come_back(world: int) -> None:
    for losses in run_ranks(world, with_gradients):
        assert all(a == b for a, b in losses)


def refusals(folder: str) -> None:
    from ds_zero import OffloadDeviceEnum, OffloadStateTypeEnum, get_state_devices

    case = Case(dtype="bfloat16")
    engine = engine_of(case)
    one_step(engine, case, 0)
    for device in (OffloadDeviceEnum.none, OffloadDeviceEnum.nvme, "nvme"):
        with pytest.raises(ValueError, match="can only go to 'cpu'"):
            engine.offload_states(device=device)
    with pytest.raises(ValueError, match="not a valid"):
        engine.offload_states(include=["weights"])

    refused_without_states(engine, case, folder)
    refused_without_weights(engine, case)

    assert get_state_devices(engine, "lp_params") == {torch.device("cpu")}
    assert get_state_devices(engine.module, OffloadStateTypeEnum.optim_states) == {
        torch.device("cpu")
    }
    assert get_state_devices(engine, "lp_grads") == set()
    with pytest.raises(ValueError, match="not a valid"):
        get_state_devices(engine, "weights")
    with pytest.raises(RuntimeError, match="no live engine under ZeRO"):
        get_state_devices(nn.Linear(1, 1), "lp_params")
    engine.offload_states()
    engine.destroy()  # brings everything back first
    assert all(p.numel() for p in engine.module.parameters())
    engine.module(**micro_batch(case, 0, 0, 0))


def refused_without_states(engine: Any, case: Case, folder: str) -> None:
    """What the step needs is offloaded: the model runs, the step is refused in every way."""
    from ds_zero import OffloadStateTypeEnum

    engine.offload_states(include=[OffloadStateTypeEnum.optim_states, "hp_params"])
    loss = forward(engine, case, 1)
    engine.backward(loss)
    with pytest.raises(
        RuntimeError, match=r"step needs hp_params, optim_states.*reload_states\(\)"
    ):
        engine.step()
    with pytest.raises(RuntimeError, match="reload_states"):
        engine.optimizer.step()
    with pytest.raises(RuntimeError, match="reload_states"):
        engine.save_checkpoint(folder)
    engine.reload_states()
    engine.zero_grad()
    one_step(engine, case, 1)


def refused_without_weights(engine: Any, case: Case) -> None:
    """Weights are offloaded: nothing runs."""
    loss = forward(engine, case, 2)
    another = forward(engine, case, 2)
    engine.offload_states(include=["lp_params"])
    with pytest.raises(RuntimeError, match=r"forward needs lp_params.*reload_states\(\)"):
        forward(engine, case, 2)
    with torch.no_grad(), pytest.raises(RuntimeError, match="reload_states"):
        forward(engine, case, 2)
    with pytest.raises(RuntimeError, match="reload_states"):
        engine.module.inp(torch.ones(2, 7, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="reload_states"):
        engine.backward(loss)
    with pytest.raises(RuntimeError, match="reload_states|modified by an inplace operation"):
        loss.backward()
    engine.reload_states()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        another.backward()  # the graph is from before
    engine.zero_grad()
    one_step(engine, case, 2)


@pytest.mark.parametrize("world", [1, 2])
def test_what_is_away_is_not_touched(world: int, tmp_path: Any) -> None:
    run_ranks(world, refusals, str(tmp_path))


def inside() -> None:
    import ds_core

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "param_persistence_threshold": 0},
    }
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh())
    engine, *_ = ds_core.initialize(model=model, config=config)

    model[0].register_forward_hook(lambda *_: engine.offload_states())
    with pytest.raises(RuntimeError, match="call it outside"):
        engine(torch.ones(1, 7))
    engine.destroy()


def test_not_inside_a_forward() -> None:
    run_ranks(2, inside)


def other_stage(stage: int) -> None:
    import ds_core

    case = Case()
    model = build_model(case)
    config = case.config(1)
    if stage:
        config["zero_optimization"] = {"stage": stage}
    engine, *_ = ds_core.initialize(model=model, config=config)
    wanted = (RuntimeError, "stage 3") if stage else (AttributeError, "offload_states")
    with pytest.raises(wanted[0], match=wanted[1]):
        engine.offload_states()
    with pytest.raises(wanted[0], match=wanted[1].replace("offload", "reload")):
        engine.reload_states()
    engine.destroy()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_only_stage_3(stage: int) -> None:
    run_ranks(1, other_stage, stage)


def access_while_away() -> list[str]:
    """States can be read and set wherever they are."""
    import ds_access as access

    case = Case(dtype="bfloat16")
    engine = engine_of(case)
    twin = engine_of(case)
    for each in (engine, twin):
        one_step(each, case, 0)
        each.backward(forward(each, case, 1))
    engine.offload_states()
    wrong = []
    for (n, p), q in zip(engine.module.named_parameters(), twin.module.parameters(), strict=True):
        for get, put in (
            (access.safe_get_full_fp32_param, access.safe_set_full_fp32_param),
            (access.safe_get_full_grad, access.safe_set_full_grad),
            (
                lambda p: access.safe_get_full_optimizer_state(p, "exp_avg_sq"),
                lambda p, v: access.safe_set_full_optimizer_state(p, v, "exp_avg_sq"),
            ),
        ):
            a = get(p)
            b = get(q)
            assert a is not None
            assert b is not None
            if not torch.equal(a, b):
                wrong.append(f"{n}: read")
            put(p, a * 0.5)
            put(q, b * 0.5)
            if not torch.equal(get(p), get(q)) or not torch.equal(get(p), a * 0.5):  # type: ignore[arg-type]
                wrong.append(f"{n}: set")
    engine.reload_states()
    for each in (engine, twin):
        each.step()
    if forward(engine, case, 2).item() != forward(twin, case, 2).item():
        wrong.append("loss")
    for each in (engine, twin):
        each.destroy()
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_access_while_states_are_away(world: int) -> None:
    assert run_ranks(world, access_while_away) == [[]] * world
