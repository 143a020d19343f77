"""What one rank refuses, all refuse, at once."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from torch import nn

import ds_core
from ds_core import comm
from ds_core.entries import Phase, Transform
from ds_core.errors import LostRankError, UsageError


def _work(talks: bool) -> str:
    """Rank 1 finds a fault in its part; the others may be agreeing on something meanwhile."""
    if comm.rank() == 1:
        raise UsageError("layer 7 cannot be divided")
    return str(comm.all_gather_json(comm.rank())) if talks else "done"


def stops(talks: bool) -> str:
    try:
        with comm.together():
            _work(talks)
    except (LostRankError, UsageError) as error:
        return f"{type(error).__name__}: {error}"
    return "went on"


@pytest.mark.parametrize("talks", [False, True])
def test_an_error_of_one_rank_is_raised_on_all(talks: bool) -> None:
    told = "LostRankError: rank 1 stopped, and so do all: UsageError: layer 7 cannot be divided"
    found = run_ranks(3, stops, talks, timeout=30.0)
    assert found == [told, "UsageError: layer 7 cannot be divided", told]


def ds_transforms(ctx: Any) -> list[Transform]:
    """Of this module as a plugin: the model is refused on one rank."""

    def apply(model: nn.Module) -> nn.Module:
        if ctx.rank == 1:
            raise ValueError("this part is odd")
        return model

    return [Transform(Phase.SUBSTITUTE, apply)]


def ds_config() -> Any:
    from ds_core.config import Section

    class Refusing(Section):
        """No keys."""

    return Refusing


def _optimizer(params: Any) -> torch.optim.Optimizer:
    if comm.rank() == 0:
        raise ValueError("not these")
    return torch.optim.SGD(params, lr=0.1)


def starts(case: str) -> tuple[str, float]:
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
    if case == "transform":
        config |= {"refusing": {}, "plugins": {"load": [f"refusing={__name__}"]}}
    began = time.perf_counter()
    try:
        ds_core.initialize(model=nn.Linear(2, 2), config=config, optimizer=_optimizer)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - began
    return "went on", 0.0


@pytest.mark.parametrize(
    ("case", "text"), [("transform", "this part is odd"), ("optimizer", "not these")]
)
def test_initialize_stops_on_every_rank(case: str, text: str) -> None:
    for said, seconds in run_ranks(2, starts, case, timeout=60.0):
        assert text in said
        assert seconds < 20
