"""Optimizers by name: what an entry may say, and classes by their dotted paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from ds_testing.truth import start
from torch import nn

import ds_core
from ds_core.entries import OptimizerEntry
from ds_core.errors import PluginError, UsageError
from ds_core.partition import Replicated


def ds_optimizers() -> Mapping[str, OptimizerEntry]:
    """This module is its own plugin."""
    return {
        "Odd": OptimizerEntry("torch.optim:SGD", groups=f"{__name__}:biases_apart"),
        "Own": OptimizerEntry("torch.optim:SGD", partitioner=f"{__name__}:Bound"),
        "Wrong": OptimizerEntry("torch.optim:SGD", partitioner="builtins:repr"),
    }


def biases_apart(groups: Any, names: Mapping[nn.Parameter, str], *, lr: float) -> Any:
    (group,) = groups
    parts: dict[bool, list[Any]] = {False: [], True: []}
    for param in group["params"]:
        parts[names[param].endswith("bias")].append(param)
    return [{"params": parts[False]}, {"params": parts[True], "lr": lr / 10}]


class Bound(Replicated):
    def bind(self, optimizer: Any) -> None:
        self.bound = type(optimizer)


def engine_of(kind: str, model: nn.Module, **config: Any) -> Any:
    optimizer = {"type": kind, "params": {"lr": 0.1}}
    return start(model, micro=1, optimizer=optimizer, plugins={"load": [__name__]}, **config)


def test_an_entry_may_split_groups_by_name() -> None:
    engine = engine_of("Odd", nn.Linear(2, 2))
    assert [(len(g["params"]), g["lr"]) for g in engine.optimizer.param_groups] == [
        (1, 0.1),
        (1, 0.01),
    ]


def test_an_optimizer_by_its_dotted_path() -> None:
    assert type(engine_of("torch.optim.Adamax", nn.Linear(1, 1)).optimizer) is torch.optim.Adamax
    assert type(engine_of("torch.optim.NAdam", nn.Linear(1, 1)).optimizer) is torch.optim.NAdam


def test_an_optimizer_brings_its_partitioner() -> None:
    partitioner = engine_of("Own", nn.Linear(1, 1)).partitioner
    assert type(partitioner) is Bound and partitioner.bound is torch.optim.SGD
    with pytest.raises(
        PluginError, match="builtins:repr of an OptimizerEntry gave a str, not a Partitioner"
    ):
        engine_of("Wrong", nn.Linear(1, 1))


def test_two_that_reduce_gradients_are_refused() -> None:
    with pytest.raises(
        (UsageError, ds_core.errors.ConfigError), match="reduces gradients by itself"
    ):
        engine_of("Own", nn.Linear(1, 1), zero_optimization={"stage": 1})
