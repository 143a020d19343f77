"""old-optimizer against the contracts of plugins and optimizers."""

from __future__ import annotations

import torch
from ds_testing import OptimizerConformance, PluginConformance
from old_optimizer.optimizer import OldOptimizer


class TestPlugin(PluginConformance):
    entry_point = "old_optimizer.plugin"


class TestOptimizer(OptimizerConformance):
    plugin = "old_optimizer.plugin"
    params = {"OldOptimizer": {"lr": 0.01, "weight_decay": 0.1}}


def test_a_step_by_hand() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -1.0]))
    weight.grad = torch.tensor([3.0, -0.5])
    OldOptimizer([weight], lr=0.1).step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.9, -0.9]))
