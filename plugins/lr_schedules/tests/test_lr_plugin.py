"""The declaration and the models of ``scheduler.params``."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from ds_lr_schedules import config, schedules
from ds_lr_schedules.plugin import NAMES, ds_schedulers
from ds_testing import PluginConformance
from pydantic import BaseModel, ValidationError

from ds_core.entries import resolve

REQUIRED: dict[str, dict[str, Any]] = {
    "LRRangeTest": {},
    "OneCycle": {"cycle_min_lr": 0.1, "cycle_max_lr": 1},
    "WarmupLR": {},
    "WarmupDecayLR": {"total_num_steps": 10},
    "WarmupCosineLR": {"total_num_steps": 10},
}


class TestPlugin(PluginConformance):
    entry_point = "ds_lr_schedules.plugin"


def model_of(name: str) -> type[BaseModel]:
    model: type[BaseModel] = resolve(str(ds_schedulers()[name].params))
    return model


def test_it_offers_the_five_names() -> None:
    assert set(ds_schedulers()) == set(REQUIRED)


@pytest.mark.parametrize("name", NAMES)
def test_the_model_has_the_defaults_of_the_class(name: str) -> None:
    parameters = list(inspect.signature(getattr(schedules, name)).parameters.values())[1:]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    fields = model_of(name).model_fields
    assert {p.name for p in parameters} == set(fields)
    assert {n: f.default for n, f in fields.items() if not f.is_required()} == defaults
    assert {n for n, f in fields.items() if f.is_required()} == set(REQUIRED[name])


def test_the_core_builds_what_the_config_names() -> None:
    import torch

    for name in NAMES:
        optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        entry = ds_schedulers()[name]
        params = model_of(name).model_validate(REQUIRED[name]).model_dump()
        schedule = resolve(entry.load)(optimizer, **params)
        assert type(schedule).__name__ == name
        assert schedule.last_batch_iteration == -1


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("WarmupLR", {"warmup_num_step": 10}),
        ("WarmupLR", {"warmup_num_steps": -1}),
        ("WarmupLR", {"warmup_num_steps": 1.5}),
        ("WarmupLR", {"warmup_num_steps": True}),
        ("WarmupLR", {"warmup_num_steps": "10"}),
        ("WarmupLR", {"warmup_max_lr": -1.0}),
        ("WarmupLR", {"warmup_max_lr": [0.1, -1.0]}),
        ("WarmupLR", {"warmup_max_lr": float("nan")}),
        ("WarmupLR", {"warmup_min_lr": "0"}),
        ("WarmupLR", {"warmup_type": 3}),
        *(
            (n, {"warmup_type": "cubic", "total_num_steps": 9})
            for n in ("WarmupDecayLR", "WarmupCosineLR")
        ),
        ("WarmupLR", {"warmup_type": "cubic"}),
        ("WarmupDecayLR", {}),
        ("WarmupCosineLR", {"total_num_steps": 10, "cos_min_ratio": [0.1]}),
        ("OneCycle", {"cycle_min_lr": 0.1}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_momentum": 1}),
        ("OneCycle", {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_second_step_size": -1}),
        ("LRRangeTest", {"lr_range_test_staircase": "yes"}),
        ("LRRangeTest", {"last_batch_iteration": -2}),
    ],
)
def test_bad_params_are_refused(name: str, params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        model_of(name).model_validate(params)


def test_whole_numbers_may_be_written_as_floats() -> None:
    checked = config.OneCycleParams.model_validate(
        {
            "cycle_min_lr": [1, 0.5],
            "cycle_max_lr": 1,
            "cycle_first_step_size": 1e3,
            "cycle_second_step_size": 2e3,
        }
    )
    assert (checked.cycle_first_step_size, checked.cycle_second_step_size) == (1000, 2000)
    assert checked.cycle_min_lr == [1, 0.5]
