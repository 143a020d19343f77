"""Optimizers under ZeRO: which go with it, and what it knows of an optimizer that is given by its
path.
"""

from __future__ import annotations

from typing import Any

import ds_optimizers
import pytest
import torch
from ds_testing.truth import start
from torch import nn

import ds_core
from ds_core.errors import ConfigError, UsageError


def engine_of(type_: str, stage: int, **params: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = {"type": type_, "params": params}
    return start(model, clip=1.0, optimizer=optimizer, zero_optimization={"stage": stage})


@pytest.mark.parametrize("name", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_the_1bit_family_does_not_go_with_zero(name: str) -> None:
    for stage in (1, 2, 3):
        with pytest.raises(
            ConfigError, match=r"optimizer.type: .*reduces gradients by itself.*set stage 0"
        ):
            engine_of(name, stage)
    engine_of(name, 0)
    model = nn.Linear(2, 2)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 1}}
    with pytest.raises(UsageError, match="reduces gradients by itself"):
        ds_core.initialize(
            model=model, optimizer=getattr(ds_optimizers, name)(model.parameters()), config=config
        )


def test_an_optimizer_by_dotted_path_is_known_to_zero_if_it_is_a_known_one() -> None:
    for path in ("torch.optim.AdamW", "ds_optimizers.lion.Lion", "ds_optimizers.lamb.FusedLamb"):
        # LAMB collects its norms from parts.
        assert engine_of(path, 1).ctx.grain == "element"
    with pytest.raises(UsageError, match="zero_allow_untested_optimizer"):
        engine_of("ds_optimizers.base.KernelOptimizer", 1, defaults={})
