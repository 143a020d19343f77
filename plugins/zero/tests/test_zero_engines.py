"""Several engines with a joint loss, and windows that mix both kinds of backward, at every
stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch import Tensor, nn

STEPS = 3
BATCH = 2
D = 5


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D), nn.Tanh(), nn.Linear(D, 2)
    ).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(
        BATCH, D, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64
    )


def config(stage: int, gas: int = 1, **more: Any) -> dict[str, Any]:
    zero = {
        "stage": stage,
        "param_persistence_threshold": 0,
        "reduce_bucket_size": 2 * D,
        "overlap_comm": True,
    }
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


def train_each(cases: list[list[int]], how: str, gas: int) -> dict[str, float]:
    """`train` for each list of stages and both kinds of backward."""
    return {
        f"{s} {drive}": error_of(s, how, drive, gas) for s in cases for drive in ("plain", "engine")
    }


def error_of(stages: list[int], how: str, drive: str, gas: int) -> float:
    """How far the weights are from one process's."""
    import ds_core
    from ds_core import comm

    rank = comm.rank()
    world = comm.world_size()
    wanted = truth(how, world, gas)
    engines = [
        ds_core.initialize(
            model=model(i + 1), config=config(stage, gas, comms_guard={"enabled": True})
        )[0]
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


@pytest.mark.fast_cases("2-same-2-stages3", "1-order-2-stages4")
@pytest.mark.parametrize(
    ("world", "how", "gas", "stages"),
    [
        (2, "unused", 1, [[0, 0], [1, 1], [2, 2], [0, 2]]),
        pytest.param(2, "unused", 2, [[0, 0], [1, 1], [2, 2], [0, 2]], marks=pytest.mark.slow),
        (2, "order", 1, [[0, 0], [2, 2], [2, 0]]),
        (2, "same", 2, [[3, 3], [3, 0], [3, 2]]),  # in stage 3 all ranks run the same modules
        (1, "order", 2, [[2, 1], [0, 3]]),
        pytest.param(4, "unused", 1, [[1, 2], [0, 1]], marks=pytest.mark.slow),
    ],
)
def test_joint_loss_is_that_of_plain_torch(
    world: int, how: str, gas: int, stages: list[list[int]]
) -> None:
    for off in run_ranks(world, train_each, stages, how, gas):
        assert max(off.values()) < 1e-12, off


def scales_apart(first: dict[str, Any], second: dict[str, Any], drive: str) -> str:
    """What a step says when the engines of a joint loss multiply it by different numbers."""
    import ds_core
    from ds_core import comm
    from ds_core.errors import UsageError

    zero = {"zero_optimization": {"stage": 1}}
    engines = [
        ds_core.initialize(model=model(1).float(), config=config(0) | zero | more)[0]
        for more in (first, second)
    ]
    x = batch(0, comm.rank()).to(next(engines[0].module.parameters()).dtype)
    y = batch(0, comm.rank()).to(next(engines[1].module.parameters()).dtype)
    loss = engines[0](x).float().square().mean() + engines[1](y).float().square().mean()
    if drive == "engine":
        engines[0].backward(loss)
    else:
        loss.backward()
    said = ""
    try:
        for engine in engines:
            engine.step()
    except UsageError as error:
        said = str(error)
    for engine in engines:
        engine.destroy()
    return said


FP16 = {"fp16": {"enabled": True, "loss_scale": 8.0}}
GAS2 = {"gradient_accumulation_steps": 2}


@pytest.mark.parametrize("world", [1, 2])
def test_engines_of_a_joint_loss_must_scale_it_alike(world: int) -> None:
    for first, second, numbers in (
        ({}, GAS2, "by 1, and this engine multiplies by 0.5"),
        (FP16, {}, "by 8, and"),
    ):
        for said in run_ranks(world, scales_apart, first, second, "engine"):
            assert numbers in said, (first, second, said)
    assert run_ranks(world, scales_apart, FP16, FP16, "engine") == [""] * world
    for said in run_ranks(world, scales_apart, FP16, FP16, "plain"):
        assert "engine.scale(loss).backward()" in said


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
        float((p - q).abs().max())
        for e, m in pairs
        for p, q in zip(e.module.parameters(), m.parameters(), strict=True)
    )


@pytest.mark.parametrize("stage", [0, 2])
def test_a_joint_backward_that_failed(stage: int) -> None:
    assert max(run_ranks(2, broken_off, stage)) < 1e-12


# -- both kinds of backward in one window ----------------------------------------------------------


def mix() -> list[str]:
    return [text for stage in range(4) for text in mix_in(stage)]


def mix_in(stage: int) -> list[str]:
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
def test_both_kinds_of_backward_in_one_micro_batch_are_refused(world: int) -> None:
    for said in run_ranks(world, mix):
        assert len(said) == 8
        assert all("came both from engine.backward(loss)" in text for text in said)


def mix_without_accumulation() -> float:
    return max(mix_without_accumulation_in(stage) for stage in range(4))


def mix_without_accumulation_in(stage: int) -> float:
    """Nothing is divided, so both may be used."""
    import ds_core

    engine, *_ = ds_core.initialize(model=model(1), config=config(stage))
    plain = model(1)
    x = batch(0, 0)
    y = batch(1, 0)
    engine.backward(engine(x).square().mean())
    engine(y).square().mean().backward()
    engine.step()
    (plain(x).square().mean() + plain(y).square().mean()).backward()
    torch.optim.SGD(plain.parameters(), lr=0.2).step()
    engine.destroy()
    return max(
        float((p - q).abs().max())
        for p, q in zip(engine.module.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize("world", [1, 2])
def test_without_accumulation_both_may_be_used(world: int) -> None:
    assert max(run_ranks(world, mix_without_accumulation)) < 1e-12


def mix_under_a_loss_scale() -> list[str]:
    """One backward is scaled and the other is not, also without accumulation; then both are."""
    import ds_core
    from ds_core.errors import UsageError

    said = []
    for stage in range(4):
        engine, *_ = ds_core.initialize(model=model(1).float(), config=config(stage, **FP16))
        losses = [engine(batch(i, 0).half()).float().square().mean() for i in range(2)]
        engine.backward(losses[0])
        losses[1].backward()
        try:
            engine.step()
        except UsageError as error:
            said.append(str(error))
        engine.zero_grad()
        losses = [engine(batch(i, 0).half()).float().square().mean() for i in range(2)]
        engine.backward(losses[0])
        engine.scale(losses[1]).backward()
        engine.step()
        assert engine.was_step_applied()
        engine.destroy()
    return said


@pytest.mark.parametrize("world", [1, 2])
def test_an_unscaled_backward_beside_a_scaled_one_is_refused(world: int) -> None:
    for said in run_ranks(world, mix_under_a_loss_scale):
        assert len(said) == 4
        assert all("engine.scale(loss).backward()" in text for text in said)


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


# -- one model, one engine -------------------------------------------------------------------------


def take_over() -> list[str]:
    """A second engine on a model, at every stage: the first one ends, and the second trains as if
    it were alone.
    """
    import ds_core
    from ds_core import comm
    from ds_core.errors import UsageError

    said = []
    for stage in range(4):
        net = model(1)
        plain = model(1)
        first: Any = ds_core.initialize(model=net, config=config(stage))[0]
        engine: Any = ds_core.initialize(model=net, config=config(stage))[0]
        try:
            first(batch(0, 0))
        except UsageError as error:
            said.append(str(error))
        engine.backward(engine(batch(0, comm.rank())).square().mean())
        engine.step()
        for rank in range(comm.world_size()):
            (plain(batch(0, rank)).square().mean() / comm.world_size()).backward()
        torch.optim.SGD(plain.parameters(), lr=0.2).step()
        engine.destroy()
        for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
            assert float((mine - theirs).abs().max()) < 1e-12, stage
    return said


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_last_engine_of_a_model_is_the_one_that_trains(world: int) -> None:
    for said in run_ranks(world, take_over):
        assert len(said) == 4
        assert all("this engine was destroyed" in text for text in said)
