"""A pipeline's engine beside others in one process, against each of them alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_pipeline import LayerSpec, PipelineModule
from ds_testing import run_ranks
from torch import Tensor, nn

import ds_core

GAS = 4


def _config(stage: int = 0, gas: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": gas,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }


def _pipe(stage: int) -> Any:
    torch.manual_seed(0)
    specs = [LayerSpec(nn.Linear, 3, 3) for _ in range(4)]
    model = PipelineModule(
        specs, num_stages=2, loss_fn=nn.functional.mse_loss, seed_layers=True
    ).double()
    return ds_core.initialize(model=model, config=_config(stage, GAS))[0]


def _plain(stage: int) -> Any:
    torch.manual_seed(1)
    return ds_core.initialize(model=nn.Linear(3, 1).double(), config=_config(stage))[0]


def _data(step: int, index: int) -> Tensor:
    return torch.randn(
        2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + index)
    )


def _step(engine: Any, step: int) -> float:
    index = engine.ctx.mesh.index("dp")
    if not engine.runner.manual:
        micros = [_data(100 * step + m, index) for m in range(GAS)]
        return float(engine.train_batch(iter([(x, x.tanh()) for x in micros])))
    loss = engine(_data(step, index)).square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _alone(make: Any, stage: int) -> list[float]:
    engine = make(stage)
    losses = [_step(engine, step) for step in range(3)]
    engine.destroy()
    return losses


def _beside(order: str, stage: int) -> bool:
    """Whether each of the engines trains as it does alone. order: "p" a pipeline, "e" another
    engine.
    """
    makers = [{"p": _pipe, "e": _plain}[kind] for kind in order]
    expected = [_alone(make, stage) for make in makers]
    engines: list[Any] = []
    found: list[list[float]] = []
    for make in makers:
        engines.append(make(stage))
        found.append([_step(engines[-1], 0)])  # also before the next one is there
    for step in range(1, 3):
        for losses, engine in zip(found, engines, strict=True):
            losses.append(_step(engine, step))
    for engine in engines:
        engine.destroy()
    return found == expected


@pytest.mark.fast_cases("eep-2-1")
@pytest.mark.parametrize(
    ("order", "world", "stage"),
    [
        ("pee", 2, 0),
        ("eep", 2, 1),
        *(
            pytest.param(o, w, s, marks=pytest.mark.slow)
            for o in ("pe", "ep", "ppe")
            for w in (2, 4)
            for s in (0, 1)
        ),
        pytest.param("eep", 2, 3, marks=pytest.mark.slow),
        pytest.param("ep", 4, 3, marks=pytest.mark.slow),
    ],
)
def test_each_trains_as_it_does_alone(order: str, world: int, stage: int) -> None:
    assert run_ranks(world, _beside, order, stage, timeout=60.0) == [True] * world
