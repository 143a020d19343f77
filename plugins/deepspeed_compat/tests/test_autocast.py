"""The functions of ``deepspeed.runtime.torch_autocast``."""

from __future__ import annotations

import pytest
import torch
from ds_deepspeed_compat.engines.autocast import (
    get_default_autocast_lower_precision_modules,
    init_autocast_params,
    is_autocast_initialized,
)
from torch import nn

import ds_core
from ds_core.precision import WIRE_DTYPES

CONFIG = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}

pytestmark = pytest.mark.usefixtures("clean_ds")


def test_an_engine_is_told_which_gradients_travel_in_16_bits() -> None:
    assert not is_autocast_initialized()
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    engine, *_ = ds_core.initialize(model=model, config=CONFIG)
    init_autocast_params(engine, torch.bfloat16)
    assert set(engine.ctx.stash[WIRE_DTYPES]) == set(model[0].parameters())
    init_autocast_params(engine, torch.float16, ["torch.nn.LayerNorm"])
    assert engine.ctx.stash[WIRE_DTYPES] == dict.fromkeys(model[1].parameters(), torch.float16)
    assert is_autocast_initialized()
    engine.destroy()
    assert not is_autocast_initialized()


def test_the_section_torch_autocast_lists_the_same_classes() -> None:
    engine, *_ = ds_core.initialize(
        model=nn.Linear(4, 4), config={**CONFIG, "torch_autocast": {"enabled": True}}
    )
    assert (
        list(engine.ctx.precision.autocast_modules)
        == get_default_autocast_lower_precision_modules()
    )
    assert is_autocast_initialized()
    engine.destroy()
