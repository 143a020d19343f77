"""Engines and steps of the tests of `PipelineModule`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from ds_testing.truth import start
from pipe_models import MICRO

W = 6


def pipeline_engine(model: nn.Module, gas: int = 2, **more: Any) -> Any:
    """An engine of a pipeline. more: for `start`."""
    return start(model, micro=MICRO, gas=gas, **more)


def squares(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


def mean(x: Tensor) -> Tensor:
    return x.square().mean()


def rows(count: int, step: int = 0, width: int = W) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(
        count, 2, 3, width, generator=torch.Generator().manual_seed(step), dtype=torch.float64
    )
    return [(a, b) for a, b in x]


def linears(count: int, seed: int = 5) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Linear(W, W).double() for _ in range(count)]


def plain_step(
    layers: list[Any], given: list[tuple[Tensor, Tensor]], loss_fn: Any = squares
) -> float:
    """One SGD step of plain torch over `layers`; the mean loss."""
    params = [
        p
        for layer in layers
        if isinstance(layer, nn.Module)
        for p in layer.parameters()
        if p.requires_grad
    ]
    total = 0.0
    for x, y in given:
        for layer in layers:
            x = layer(x)
        loss = (loss_fn(x, y) if loss_fn is not None else x) / len(given)
        loss.backward()
        total += loss.item()
    with torch.no_grad():
        for param in dict.fromkeys(params):
            param -= 0.1 * param.grad
            param.grad = None
    return total


def trains_like(engine: Any, layers: list[Any], loss_fn: Any = squares, steps: int = 2) -> None:
    for step in range(steps):
        given = rows(engine.gradient_accumulation_steps(), step)
        assert engine.train_batch(iter(given)).item() == pytest.approx(
            plain_step(layers, given, loss_fn), rel=1e-12
        )
