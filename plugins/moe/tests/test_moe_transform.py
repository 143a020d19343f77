"""Binding MoE layers to the mesh changes neither names nor numbers."""

from __future__ import annotations

import torch
from ds_moe import MoE
from ds_testing import TransformConformance
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.moe = MoE(8, nn.Linear(8, 8), 4, k=2, use_rts=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.moe(self.first(x))[0]
        return y


class TestBinding(TransformConformance):
    plugin = "ds_moe.plugin"
    config = {"expert_parallel": {"enabled": False}}

    def make_model(self) -> nn.Module:
        return Net()

    def make_batch(self) -> Tensor:
        return torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
