"""The end of a run: the model sees whole sequences again."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from ds_testing import TransformConformance
from torch import Tensor, nn

LTD: dict[str, Any] = {
    "enabled": True,
    "total_layer_num": 2,
    "random_ltd_layer_num": 2,
    "random_ltd_layer_id": [0, 1],
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 2,
        "max_value": 4,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 10, "seq_per_step": 1},
    },
}
SHORT: dict[str, Any] = {
    "enabled": True,
    "curriculum_type": "seqlen",
    "min_difficulty": 2,
    "max_difficulty": 4,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 1},
}


class Block(nn.Module):
    """Its tokens look at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)).cumsum(1)


class TestDroppedTokens(TransformConformance):
    plugin = "ds_data_sampling.plugin"
    config: ClassVar[Any] = {
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": LTD}}
    }
    same_outputs = False

    def make_model(self) -> nn.Module:
        return nn.Sequential(Block(), Block())

    def make_batch(self) -> Tensor:
        return torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1))


class TestShortSequences(TestDroppedTokens):
    plugin = "ds_data_sampling.curriculum_section"
    config: ClassVar[Any] = {"curriculum_learning": SHORT}
