"""A provider of collectives of somebody else's; see ordered_sums.py beside this file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from ds_testing import CollectivesConformance, WorkerPool, run_ranks

from ds_core.errors import ConfigError

HERE = str(Path(__file__).parent)


def weights_and_calls(collectives: str | None, **sections: Any) -> list[Any]:
    import torch

    import ds_core

    sys.path.insert(0, HERE)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2, bias=False)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "plugins": {"load": ["ordered_sums=ordered_sums"]},
        "collectives": collectives,
        **sections,
    }
    engine, *_ = ds_core.initialize(model=model, config=config)
    sys.modules["ordered_sums"].CALLS.clear()
    for _ in range(3):
        engine.backward(engine(torch.full((1, 4), 1.0 + engine.ctx.rank)).square().sum())
        engine.step()
    engine.destroy()
    return [model.weight.tolist(), sys.modules["ordered_sums"].CALLS]


def test_it_serves_where_the_config_names_it() -> None:
    (named, calls), _ = run_ranks(2, weights_and_calls, "Ordered")
    (plain, none), _ = run_ranks(2, weights_and_calls, "torch")
    assert len(calls) == 3 and not none
    assert named == plain
    with pytest.raises(
        ConfigError, match="no collective is called 'quick'; installed: .*ordered.*torch"
    ):
        weights_and_calls("quick")


def train_with(largest: int) -> list[Any]:
    return weights_and_calls("Ordered", ordered_sums={"largest": largest})


def test_it_is_given_its_section() -> None:
    """Each pool has groups of its own, which are served as the first run says."""
    for largest, sums in ((8, 0), (65536, 3)):
        with WorkerPool(2) as pool:
            assert len(pool.run(train_with, largest)[0][1]) == sums, "gradients have 32 bytes"


def ordered_sums(group: Any, messages: bool) -> Any:
    sys.path.insert(0, HERE)
    from ordered_sums import ordered_sums as made

    return made(group, messages)


class TestOrderedSums(CollectivesConformance):
    provider = f"{__name__}:ordered_sums"
    polls = False
    ranks = (2,)
    thresholds = (65536,)
