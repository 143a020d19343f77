"""examples/rlhf learns: its reward rises from chance to nearly all, with fixed seeds."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from ds_testing import run_ranks

EXAMPLE = Path(__file__).parents[3] / "examples/rlhf"


def example() -> Any:
    os.environ["HF_HUB_OFFLINE"] = "1"
    spec = importlib.util.spec_from_file_location("rlhf_example", EXAMPLE / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rewards(steps: int) -> list[float]:
    found: list[float] = example().train(str(EXAMPLE / "ds_config.json"), steps)
    return found


def test_the_reward_and_the_advantages() -> None:
    pytest.importorskip("transformers")
    import torch

    module = example()
    prompts = torch.tensor([[10, 8], [10, 8]])
    answers = torch.tensor([[9, 0, 1], [9, 0, 2]])
    found = module.reward(prompts, answers)
    assert torch.allclose(found, torch.tensor([1.0, 2 / 3]))
    better = module.advantages(torch.cat([found, torch.ones(2)]), 2)
    assert better[0] > 0.5 and torch.allclose(better[0], -better[1]) and not better[2:].any()


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_it_learns(world: int) -> None:
    pytest.importorskip("transformers")
    for seen in run_ranks(world, rewards, 150):
        assert sum(seen[:10]) < 2.0 and sum(seen[-10:]) > 7.5, seen
