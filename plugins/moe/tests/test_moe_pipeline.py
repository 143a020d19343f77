"""MoE layers in pipeline stages equal one process, with experts on one rank of a stage or on two."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

import moe_models as m
from ds_moe import MoE
from ds_testing import RunnerConformance
from test_moe_conformance import zero


class Stage(nn.Module):
    """A MoE layer with a residual; its auxiliary loss becomes part of the gradient."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.moe = MoE(
            m.HIDDEN,
            m.expert(),
            m.NUM,
            ep_size=ep,
            k=2,
            drop_tokens=False,
            top2_2nd_expert_sampling=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(x)[0]


class PlainStage(Stage):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.moe = m.PlainMoE(2, None)


def square(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().sum() / 10


def piped(ep: int) -> nn.Module:
    from ds_pipeline import PipelineModule

    layers = [nn.Linear(5, m.HIDDEN), Stage(ep), nn.Tanh(), Stage(ep), nn.Linear(m.HIDDEN, 3)]
    return m.fill(
        PipelineModule(layers, num_stages=2, loss_fn=square, partition_method="uniform").double()
    )


def piped_one() -> nn.Module:
    return piped(1)


def piped_two() -> nn.Module:
    return piped(2)


class PlainPiped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Linear(5, m.HIDDEN),
            PlainStage(),
            nn.Tanh(),
            PlainStage(),
            nn.Linear(m.HIDDEN, 3),
        ]
        self.layers = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers)})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return square(x, y)


def plain_piped() -> nn.Module:
    return m.fill(PlainPiped().double())


def pair(step: int, micro: int, index: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1000 * step + 10 * micro + index)
    return (
        torch.randn(3, 5, generator=random, dtype=torch.float64),
        torch.randn(3, 3, generator=random, dtype=torch.float64),
    )


class TestPipelineEp1(RunnerConformance):
    worlds = (2,)
    config = {"expert_parallel": {}}
    variants = {"zero1": zero(1)}
    make_model = staticmethod(piped_one)
    make_truth = staticmethod(plain_piped)
    make_batch = staticmethod(pair)


@pytest.mark.slow
class TestPipelineEp2(RunnerConformance):
    worlds = (4,)
    config = {"expert_parallel": {"autoep_size": 2}}
    variants = {"zero0": {}, "zero1": zero(1), "zero2": zero(2), "zero3": zero(3)}
    make_model = staticmethod(piped_two)
    make_truth = staticmethod(plain_piped)
    make_batch = staticmethod(pair)
