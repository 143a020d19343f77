"""The end of a run: the model has all its layers again, whoever ended it."""

from __future__ import annotations

import copy
import gc
from typing import Any, ClassVar

import pytest
import torch
from ds_testing import TransformConformance
from ds_testing.one_process import one_process_engine
from torch import Tensor, nn

import ds_core
from ds_core.errors import UsageError

DROPS = {"progressive_layer_drop": {"enabled": True, "theta": 0.01, "gamma": 100.0}}
TRAINS: dict[str, Any] = {
    "train_batch_size": 3,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, pld_theta: float = 1.0) -> Tensor:
        y: Tensor = self.inner(x) * pld_theta
        return y


class TestLayers(TransformConformance):
    plugin = "ds_progressive_layer_drop.plugin"
    config: ClassVar[Any] = DROPS
    same_outputs = False

    def make_model(self) -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(4)))


class TestForward(TestLayers):
    def make_model(self) -> nn.Module:
        return Told()


def test_an_engine_that_was_forgotten_leaves_all_layers() -> None:
    model = TestLayers().model()
    x = torch.ones(3, 4)
    wanted = copy.deepcopy(model)(x)
    engine = ds_core.initialize(model=model, config=TRAINS | DROPS)[0]
    del engine
    gc.collect()
    torch.testing.assert_close(model.train()(x), wanted)
    with one_process_engine(model, TRAINS) as plain:
        torch.testing.assert_close(plain(x), wanted)
    assert all("forward" not in vars(part) for part in model)


def test_an_initialize_that_fails_leaves_all_layers() -> None:
    model = TestLayers().model()
    with pytest.raises(UsageError, match="nothing to train"):
        ds_core.initialize(model=model, model_parameters=[], config=TRAINS | DROPS)
    assert all("forward" not in vars(part) for part in model)
    assert "ds_undo" not in vars(model)


def test_it_stands_before_tokens_that_are_dropped_and_blocks_that_are_recomputed() -> None:
    """Each of the three calls the next one, and the layer comes last."""
    ltd = {
        "enabled": True,
        "total_layer_num": 4,
        "random_ltd_layer_num": 4,
        "random_ltd_layer_id": [0, 1, 2, 3],
        "hidden_state_order": "batch_seq_dim",
        "random_ltd_schedule": {
            "min_value": 2,
            "max_value": 4,
            "schedule_type": "fixed_linear",
            "schedule_config": {"require_steps": 10, "seq_per_step": 1},
        },
    }
    config = {
        **TRAINS,
        **DROPS,
        "data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": ltd}},
        "activation_checkpointing": {"modules": ["Block"]},
    }
    model = TestLayers().model()
    with one_process_engine(model, config):
        outer: Any = model[0].forward
        chain = [outer, outer.forward, outer.forward.forward, outer.forward.forward.forward]
        assert [type(part).__name__ for part in chain] == [
            "Skipped",
            "SomeTokens",
            "Block",
            "method",
        ]
