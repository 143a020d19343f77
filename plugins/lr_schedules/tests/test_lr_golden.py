"""The documents' golden values (api.md section 27), each read from the optimizer's groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ds_lr_schedules import schedules

CYCLE = {
    "cycle_first_step_size": 4,
    "cycle_second_step_size": 6,
    "decay_lr_rate": 0.1,
    "decay_step_size": 2,
}
WARM_UP = {"warmup_max_lr": 0.1, "warmup_num_steps": 4}
RANGE = {
    "lr_range_test_min_lr": 0.001,
    "lr_range_test_step_size": 3,
    "lr_range_test_step_rate": 1.0,
}
COSINE = {"total_num_steps": 10, "warmup_num_steps": 4, "cos_min_ratio": 0.0}

GOLDEN: dict[str, tuple[str, dict[str, Any], str]] = {
    "range test": ("LRRangeTest", RANGE, ".001 .001333 .001667 .002 .002333 .002667 .003 .003333"),
    "range test, staircase": (
        "LRRangeTest",
        RANGE | {"lr_range_test_staircase": True},
        ".001 .001 .001 .002 .002 .002 .003 .003",
    ),
    "one cycle": (
        "OneCycle",
        CYCLE | {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1},
        ".01 .0325 .055 .0775 .1 .085 .07 .055 .04 .025 .01 .009524 .009091 .008696 .008333",
    ),
    "one cycle, stairs": (
        "OneCycle",
        {
            "cycle_min_lr": 0,
            "cycle_max_lr": 1,
            "cycle_first_step_size": 4,
            "cycle_first_stair_count": 2,
        },
        "0 0 .5 .5 1 .5 .5 0 0 0",
    ),
    "warm-up, log": ("WarmupLR", WARM_UP, "0 0 .05 .079248 .1 .1 .1"),
    "warm-up, linear": ("WarmupLR", WARM_UP | {"warmup_type": "linear"}, "0 0 .025 .05 .075 .1 .1"),
    "warm-up and decay": (
        "WarmupDecayLR",
        WARM_UP | {"total_num_steps": 10},
        "0 0 .05 .079248 .1 .1 .083333 .066667 .05 .033333 .016667 0 0",
    ),
    "warm-up and cosine": (
        "WarmupCosineLR",
        COSINE,
        "0 0 .5 .792481 1 .933013 .75 .5 .25 .066987 0 0 0",
    ),
}


def make_optimizer(lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=lr)


@pytest.mark.parametrize("case", GOLDEN)
def test_learning_rates(case: str) -> None:
    name, arguments, golden = GOLDEN[case]
    optimizer = make_optimizer()
    schedule = getattr(schedules, name)(optimizer, **arguments)
    expected = [float(word) for word in golden.split()]
    seen = []
    for _ in expected:
        seen.append(optimizer.param_groups[0]["lr"])
        assert schedule.get_lr() == schedule.get_last_lr() == seen[-1:]
        schedule.step()
    assert seen == pytest.approx(expected, rel=0, abs=1e-6)


def test_momentum_of_one_cycle() -> None:
    golden = ".8 .875 .85 .825 .8 .816667 .833333 .85 .866667 .883333 .9 .945 .99 1.035 1.08"
    expected = [float(word) for word in golden.split()]
    optimizer = make_optimizer()
    schedule = schedules.OneCycle(optimizer, 0.01, 0.1, decay_mom_rate=0.1, **CYCLE)  # type: ignore[arg-type]
    seen = []
    for _ in expected:
        seen.append(optimizer.param_groups[0]["betas"])
        assert schedule.get_mom() == [seen[-1][0]]
        schedule.step()
    assert [beta1 for beta1, _ in seen] == pytest.approx(expected, rel=0, abs=1e-6)
    assert {beta2 for _, beta2 in seen} == {0.99}
