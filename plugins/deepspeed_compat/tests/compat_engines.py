"""A small model and an engine of it."""

from __future__ import annotations

from typing import Any

import torch
from ds_deepspeed_compat.engines.engine import initialize
from torch import nn


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def compat_engine(model: nn.Module | None = None, **config: Any) -> Any:
    given = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}} | config
    return initialize(model=model or net(), config=given)[0]


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
