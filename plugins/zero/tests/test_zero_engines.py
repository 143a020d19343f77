"""Several engines with a joint loss, and windows that mix both kinds of backward, at every stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ds_core.testing import run_ranks

STEPS, BATCH, D = 3, 2, 5


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2)).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(BATCH, D, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def config(stage: int, gas: int = 1, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "param_persistence_threshold": 0, "reduce_bucket_size": 2 * D, "overlap_comm": True}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}},
        "plugins": {"load": ["ds_zero.plugin"]},
        **({"zero_optimization": zero} if stage else {}),
        **more,
    }


def joint_loss(how: str, rank: int, step: int, x: Tensor, a: Any, b: Any) -> Tensor:
    """Of two parts, which on odd ranks come in the other order, or partly not at all."""
    flipped = rank % 2 == 1 and how != "same"
    if how == "unused":
        left_out = b if flipped else (a if step == 1 else None)
        parts = [m(x).square().mean() for m in (a, b) if m is not left_out]
    else:
        parts = [m(x).square().mean() for m in ((b, a) if flipped else (a, b))]
    return torch.stack(parts).sum()


def truth(how: str, world: int, gas: int) -> list[Tensor]:
    models = [model(1), model(2)]
    params = [p for m in models for p in m.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.2, momentum=0.9)
    for step in range(STEPS):
        for micro in range(gas):
            for rank in range(world):
                x = batch(gas * step + micro, rank)
                (joint_loss(how, rank, step, x, *models) / world / gas).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in params]


def train(stages: list[int], how: str, drive: str, gas: int) -> float:
    """How far the weights are from one process's."""
    import ds_core
    from ds_core import comm

    rank, world = comm.rank(), comm.world_size()
    wanted = truth(how, world, gas)
    engines = [
        ds_core.initialize(model=model(i + 1), config=config(stage, gas, comms_guard={"enabled": True}))[0]
        for i, stage in enumerate(stages)
    ]
    for step in range(STEPS):
        for micro in range(gas):
            loss = joint_loss(how, rank, step, batch(gas * step + micro, rank), *engines)
            if drive == "engine":
                engines[1].backward(loss)
            else:
                loss.backward()
            for engine in engines:
                engine.step()
    for engine in engines:
        engine.destroy()
    mine = [p.detach() for engine in engines for p in engine.module.parameters()]
    return max(float((a - b).abs().max()) for a, b in zip(mine, wanted, strict=True))


@pytest.mark.parametrize("gas", [1, 2])
@pytest.mark.parametrize("drive", ["plain", "engine"])
@pytest.mark.parametrize("stages", [[0, 0], [1, 1], [2, 2], [0, 2]], ids=str)
def test_joint_loss_of_which_ranks_use_different_parts(stages: list[int], drive: str, gas: int) -> None:
    assert max(run_ranks(2, train, stages, "unused", drive, gas)) < 1e-12


@pytest.mark.parametrize("drive", ["plain", "engine"])
@pytest.mark.parametrize("stages", [[0, 0], [2, 2], [2, 0]], ids=str)
def test_joint_loss_in_another_order_on_other_ranks(stages: list[int], drive: str) -> None:
    assert max(run_ranks(2, train, stages, "order", drive, 1)) < 1e-12


@pytest.mark.parametrize("drive", ["plain", "engine"])
def test_joint_loss_on_one_and_four_ranks(drive: str) -> None:
    assert max(run_ranks(1, train, [2, 1], "order", drive, 2)) < 1e-12
    assert max(run_ranks(4, train, [1, 2], "unused", drive, 1)) < 1e-12


@pytest.mark.parametrize("drive", ["plain", "engine"])
def test_joint_loss_in_stage_3(drive: str) -> None:
    """All ranks run the same modules, as stage 3 needs."""
    assert max(run_ranks(2, train, [3, 3], "same", drive, 2)) < 1e-12
    assert max(run_ranks(2, train, [3, 0], "same", drive, 1)) < 1e-12


def broken_off(stage: int) -> float:
    """A joint backward that fails half-way leaves nothing behind that the next one trips over."""
    import ds_core
    from ds_core import comm

    a, b = (ds_core.initialize(model=model(i), config=config(stage))[0] for i in (1, 2))
    x = batch(0, comm.rank())

    def fail(grad: Tensor) -> None:
        raise ValueError("in backward")

    hidden = a(x)
    hidden.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        (hidden.square().mean() + b(x).square().mean()).backward()
    for engine in (a, b):
        engine.zero_grad()
    (a(x).square().mean() + b(x).square().mean()).backward()
    a.step()
    b.step()
    plain = [model(1), model(2)]
    for rank in range(comm.world_size()):
        y = batch(0, rank)
        (sum(m(y).square().mean() for m in plain) / comm.world_size()).backward()  # type: ignore[union-attr]
    for m in plain:
        torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9).step()
    for engine in (a, b):
        engine.destroy()
    pairs = zip((a, b), plain, strict=True)
    return max(
        float((p - q).abs().max()) for e, m in pairs for p, q in zip(e.module.parameters(), m.parameters(), strict=True)
    )


@pytest.mark.parametrize("stage", [0, 2])
def test_a_joint_backward_that_failed(stage: int) -> None:
    assert max(run_ranks(2, broken_off, stage)) < 1e-12


# -- both kinds of backward in one window --------------------------------------------------------------------------


def mix(stage: int) -> list[str]:
    import ds_core
    from ds_core.errors import UsageError

    said = []
    for first in ("engine", "plain"):
        engine, *_ = ds_core.initialize(model=model(1), config=config(stage, gas=2))
        losses = [engine(batch(i, 0)).square().mean() for i in range(2)]
        try:
            if first == "engine":
                engine.backward(losses[0])
                losses[1].backward()
                engine.step()
            else:
                losses[0].backward()
                engine.backward(losses[1])
        except UsageError as error:
            said.append(str(error))
        engine.zero_grad()
        for _ in range(2):  # afterwards it trains on
            engine.backward(engine(batch(3, 0)).square().mean())
            engine.step()
        assert engine.was_step_applied()
        engine.destroy()
    return said


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_both_kinds_of_backward_in_one_micro_batch_are_refused(stage: int, world: int) -> None:
    for said in run_ranks(world, mix, stage):
        assert len(said) == 2
        assert all("came both from engine.backward(loss)" in text for text in said)


def mix_without_accumulation(stage: int) -> float:
    """Nothing is divided, so both may be used."""
    import ds_core

    engine, *_ = ds_core.initialize(model=model(1), config=config(stage))
    plain = model(1)
    x, y = batch(0, 0), batch(1, 0)
    engine.backward(engine(x).square().mean())
    engine(y).square().mean().backward()
    engine.step()
    (plain(x).square().mean() + plain(y).square().mean()).backward()
    torch.optim.SGD(plain.parameters(), lr=0.2).step()
    engine.destroy()
    return max(float((p - q).abs().max()) for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_accumulation_both_may_be_used(stage: int, world: int) -> None:
    assert max(run_ranks(world, mix_without_accumulation, stage)) < 1e-12


def accumulation_set_later() -> str:
    import ds_core
    from ds_core.errors import UsageError

    engine, *_ = ds_core.initialize(model=model(1), config=config(0))
    engine.set_train_batch_size(2 * BATCH)
    engine.backward(engine(batch(0, 0)).square().mean())
    engine(batch(0, 0)).square().mean().backward()
    try:
        engine.step()
    except UsageError as error:
        return str(error)
    return ""


def test_accumulation_that_is_set_later_is_watched_too() -> None:
    assert "came both from" in run_ranks(1, accumulation_set_later)[0]
