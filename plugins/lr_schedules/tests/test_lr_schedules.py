"""The schedules' contract: arguments, groups, errors, warnings, state, and resuming."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from ds_lr_schedules.schedules import (
    LRRangeTest,
    OneCycle,
    Schedule,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

EVERY: list[tuple[type[Schedule], dict[str, Any]]] = [
    (LRRangeTest, {"lr_range_test_min_lr": 0.01, "lr_range_test_step_size": 3}),
    (LRRangeTest, {"lr_range_test_step_size": 3, "lr_range_test_staircase": True}),
    (OneCycle, {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 5, "decay_step_size": 2,
                "decay_lr_rate": 0.5, "decay_mom_rate": 0.01}),
    (WarmupLR, {"warmup_num_steps": 6}),
    (WarmupLR, {"warmup_num_steps": 6, "warmup_max_lr": 0.3, "warmup_type": "linear"}),
    (WarmupDecayLR, {"total_num_steps": 15, "warmup_num_steps": 6}),
    (WarmupCosineLR, {"total_num_steps": 15, "warmup_num_steps": 6, "warmup_min_ratio": 0.1}),
]  # fmt: skip
LABELS = [f"{cls.__name__}-{i}" for i, (cls, _) in enumerate(EVERY)]


def make_optimizer(*lrs: float, cls: Any = torch.optim.Adam, **extra: Any) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(2))], "lr": lr} for lr in lrs or (0.5,)]
    optimizer: torch.optim.Optimizer = cls(groups, **extra)
    return optimizer


def settings(optimizer: torch.optim.Optimizer) -> list[tuple[float, Any]]:
    return [(group["lr"], group.get("betas")) for group in optimizer.param_groups]


def trace_of(optimizer: torch.optim.Optimizer, schedule: Schedule, steps: int) -> list[Any]:
    trace = []
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.detach() + 1
        optimizer.step()
        schedule.step()
        trace.append(settings(optimizer))
    return trace


# -- groups ----------------------------------------------------------------------------------------


def test_a_scalar_serves_every_group() -> None:
    optimizer = make_optimizer(0.1, 0.2)
    WarmupLR(optimizer, warmup_max_lr=1.0, warmup_num_steps=2).step(5)
    assert [g["lr"] for g in optimizer.param_groups] == [1.0, 1.0]


def test_without_a_maximum_each_group_keeps_its_own() -> None:
    optimizer = make_optimizer(0.1, 0.2)
    WarmupLR(optimizer, warmup_num_steps=2).step(5)
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.2]


def test_cosine_scales_each_group() -> None:
    optimizer = make_optimizer(0.1, 0.2)
    schedule = WarmupCosineLR(
        optimizer, 10, warmup_min_ratio=[0.0, 0.5], warmup_num_steps=4, cos_min_ratio=0.25
    )
    assert [g["lr"] for g in optimizer.param_groups] == [0.0, 0.0]
    schedule.step(0)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.0, 0.1])
    schedule.step(9)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.025, 0.05])


@pytest.mark.parametrize(
    ("cls", "arguments", "at", "expected"),
    [
        (LRRangeTest, {"lr_range_test_min_lr": [1, 2], "lr_range_test_step_size": 1}, 0, [2, 4]),
        (
            OneCycle,
            {"cycle_min_lr": [0, 1], "cycle_max_lr": [1, 3], "cycle_first_step_size": 2},
            0,
            [0.5, 2],
        ),
        (
            WarmupLR,
            {"warmup_min_lr": (0, 1), "warmup_max_lr": (2, 3), "warmup_num_steps": 4},
            1,
            [1, 2],
        ),
        (
            WarmupDecayLR,
            {
                "total_num_steps": 4,
                "warmup_min_lr": [0, 1],
                "warmup_max_lr": [2, 3],
                "warmup_num_steps": 2,
            },
            3,
            [1, 2],
        ),
    ],
)
def test_lists_have_one_entry_per_group(
    cls: Any, arguments: dict[str, Any], at: int, expected: list[float]
) -> None:
    optimizer = make_optimizer(0.1, 0.2)
    cls(optimizer, **arguments).step(at)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx(expected)


def test_momenta_per_group() -> None:
    optimizer = make_optimizer(0.1, 0.2)
    schedule = OneCycle(
        optimizer, 0, 1, cycle_first_step_size=2, cycle_min_mom=[0.5, 0.6], cycle_max_mom=[0.9, 1.0]
    )
    assert [g["betas"] for g in optimizer.param_groups] == [(0.5, 0.99), (0.6, 0.99)]
    schedule.step()
    assert [g["betas"][0] for g in optimizer.param_groups] == pytest.approx([0.7, 0.8])


@pytest.mark.parametrize(
    ("cls", "arguments", "name"),
    [
        (LRRangeTest, {"lr_range_test_min_lr": [1.0]}, "lr_range_test_min_lr"),
        (OneCycle, {"cycle_min_lr": [0.1, 0.1, 0.1], "cycle_max_lr": 1}, "cycle_min_lr"),
        (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": [1]}, "cycle_max_lr"),
        (
            OneCycle,
            {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_min_mom": [0.8]},
            "cycle_min_mom",
        ),
        (OneCycle, {"cycle_min_lr": 0.1, "cycle_max_lr": 1, "cycle_max_mom": []}, "cycle_max_mom"),
        (WarmupLR, {"warmup_min_lr": [0.1]}, "warmup_min_lr"),
        (WarmupLR, {"warmup_max_lr": [0.1]}, "warmup_max_lr"),
        (WarmupDecayLR, {"total_num_steps": 2000, "warmup_max_lr": [0.1]}, "warmup_max_lr"),
        (WarmupCosineLR, {"total_num_steps": 2000, "warmup_min_ratio": [0.1]}, "warmup_min_ratio"),
    ],
)
def test_a_list_of_another_length_is_refused(
    cls: Any, arguments: dict[str, Any], name: str
) -> None:
    with pytest.raises(
        ValueError, match=f"{name} has [013] entries and the optimizer has 2 parameter groups"
    ):
        cls(make_optimizer(0.1, 0.2), **arguments)


def test_a_group_added_later_is_refused() -> None:
    optimizer = make_optimizer(0.1)
    schedule = WarmupLR(optimizer)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(
        RuntimeError, match=r"WarmupLR was made for 1 parameter groups and the optimizer now has 2"
    ):
        schedule.step()


# -- errors and warnings ---------------------------------------------------------------------------

CYCLE = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0}


@pytest.mark.parametrize("value", [0, -3, 2.5, 1e3, "10", None, True])
@pytest.mark.parametrize(
    ("cls", "name", "others"),
    [
        (LRRangeTest, "lr_range_test_step_size", {}),
        (OneCycle, "cycle_first_step_size", CYCLE),
        (WarmupLR, "warmup_num_steps", {}),
        (WarmupDecayLR, "warmup_num_steps", {"total_num_steps": 9}),
        (WarmupDecayLR, "total_num_steps", {}),
        (WarmupCosineLR, "warmup_num_steps", {"total_num_steps": 9}),
        (WarmupCosineLR, "total_num_steps", {}),
    ],
)
def test_counts_are_positive_integers(
    cls: Any, name: str, others: dict[str, Any], value: Any
) -> None:
    if name == "warmup_num_steps" and value == 0:
        value = -1  # 0 is no warm-up
    with pytest.raises(
        ValueError, match=f"{name} must be (a positive integer|an integer of at least 0), not "
    ):
        cls(make_optimizer(), **{name: value}, **others)


@pytest.mark.parametrize(
    "name",
    [
        "cycle_second_step_size",
        "cycle_first_stair_count",
        "cycle_second_stair_count",
        "decay_step_size",
    ],
)
def test_optional_counts_are_not_negative(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be an integer of at least 0, not -1"):
        OneCycle(make_optimizer(), 0.1, 1.0, **{name: -1})


@pytest.mark.parametrize(("cls", "arguments"), EVERY, ids=LABELS)
def test_what_is_no_optimizer_is_refused(cls: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{cls.__name__} needs a torch.optim.Optimizer, not list"):
        cls([], **arguments)
    with pytest.raises(
        ValueError, match="last_batch_iteration must be an integer of at least -1, not -2"
    ):
        cls(make_optimizer(), **arguments, last_batch_iteration=-2)


def test_unknown_warm_up_type_is_log(caplog: pytest.LogCaptureFixture) -> None:
    odd = make_optimizer()
    plain = make_optimizer()
    with caplog.at_level(logging.WARNING):
        schedule = WarmupLR(odd, warmup_num_steps=9, warmup_type="cubic")
    assert [r.getMessage() for r in caplog.records] == [
        "WarmupLR: warmup_type 'cubic' is not known and 'log' is used; choose 'log' or 'linear'"
    ]
    schedule.step(3)
    WarmupLR(plain, warmup_num_steps=9).step(3)
    assert settings(odd) == settings(plain)


@pytest.mark.parametrize("cls", [WarmupDecayLR, WarmupCosineLR])
def test_a_total_below_the_warm_up_is_a_warning(cls: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        cls(make_optimizer(), 10, warmup_num_steps=10)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        cls(make_optimizer(), 9, warmup_num_steps=10)
    (record,) = caplog.records
    assert "total_num_steps 9 is less than the 10 steps of the warm-up" in record.getMessage()


def test_an_optimizer_without_betas_keeps_its_momentum(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = make_optimizer(cls=torch.optim.SGD, momentum=0.3)
    with caplog.at_level(logging.WARNING):
        schedule = OneCycle(optimizer, 0.1, 1.0, cycle_first_step_size=2)
    assert [r.getMessage().partition(";")[0] for r in caplog.records] == [
        "OneCycle: cycle_momentum is off, since SGD has no betas"
    ]
    schedule.step()
    assert optimizer.param_groups[0]["momentum"] == 0.3
    assert schedule.get_mom() == []
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.55)


def test_momentum_cycling_can_be_off() -> None:
    optimizer = make_optimizer(betas=(0.7, 0.8))
    OneCycle(optimizer, 0.1, 1.0, cycle_momentum=False).step()
    assert optimizer.param_groups[0]["betas"] == (0.7, 0.8)


# -- cycle details ---------------------------------------------------------------------------------


def test_second_half_defaults_to_the_first() -> None:
    given = make_optimizer()
    default = make_optimizer()
    arguments = {"cycle_first_step_size": 6, "cycle_first_stair_count": 3}
    one = OneCycle(given, 0, 1, cycle_second_step_size=6, cycle_second_stair_count=3, **arguments)  # type: ignore[arg-type]
    two = OneCycle(default, 0, 1, **arguments)  # type: ignore[arg-type]
    assert trace_of(given, one, 14) == trace_of(default, two, 14)


def test_stairs_differ_between_the_halves() -> None:
    optimizer = make_optimizer()
    schedule = OneCycle(
        optimizer,
        0,
        1,
        cycle_first_step_size=4,
        cycle_first_stair_count=4,
        cycle_second_stair_count=1,
    )
    assert [row[0][0] for row in trace_of(optimizer, schedule, 8)] == [
        0.25,
        0.5,
        0.75,
        1,
        0,
        0,
        0,
        0,
    ]


def test_without_a_decay_step_size_both_stay() -> None:
    optimizer = make_optimizer()
    schedule = OneCycle(
        optimizer, 0.1, 1, decay_lr_rate=5.0, decay_mom_rate=5.0, cycle_first_step_size=2
    )
    schedule.step(100)
    assert settings(optimizer) == [(0.1, (0.9, 0.99))]


@pytest.mark.parametrize("length", [3, 7, 10, 49, 1000])
def test_stairs_are_never_missed_by_rounding(length: int) -> None:
    optimizer = make_optimizer()
    schedule = OneCycle(
        optimizer, 0, 1, cycle_first_step_size=length, cycle_first_stair_count=length
    )
    for step in range(1, length + 1):
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(step / length, abs=1e-12)


# -- state and resuming ----------------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "arguments"), EVERY, ids=LABELS)
def test_the_state_is_the_counter(cls: Any, arguments: dict[str, Any]) -> None:
    schedule = cls(make_optimizer(), **arguments)
    assert schedule.state_dict() == {"last_batch_iteration": -1}
    schedule.step()
    schedule.step()
    assert schedule.state_dict() == {"last_batch_iteration": 1}


@pytest.mark.parametrize("stop", [0, 1, 3, 7, 12])
@pytest.mark.parametrize(("cls", "arguments"), EVERY, ids=LABELS)
def test_resuming_equals_going_on(cls: Any, arguments: dict[str, Any], stop: int) -> None:
    straight = make_optimizer(0.5, 0.25)
    expected = trace_of(straight, cls(straight, **arguments), 20)

    first = make_optimizer(0.5, 0.25)
    schedule = cls(first, **arguments)
    seen = trace_of(first, schedule, stop)
    kept = first.state_dict()
    counter = schedule.state_dict()

    second = make_optimizer(0.5, 0.25)
    resumed = cls(second, **arguments)
    for new, old in zip(second.param_groups, first.param_groups, strict=True):
        new["params"][0].data.copy_(old["params"][0].data)
    second.load_state_dict(kept)
    resumed.load_state_dict(counter)
    assert settings(second) == settings(first)
    assert seen + trace_of(second, resumed, 20 - stop) == expected
    for one, two in zip(straight.param_groups, second.param_groups, strict=True):
        assert torch.equal(one["params"][0], two["params"][0])


@pytest.mark.parametrize(("cls", "arguments"), EVERY, ids=LABELS)
def test_resuming_by_argument_after_the_optimizer_was_loaded(
    cls: Any, arguments: dict[str, Any]
) -> None:
    first = make_optimizer(0.5, 0.25)
    schedule = cls(first, **arguments)
    trace_of(first, schedule, 9)
    second = make_optimizer(0.5, 0.25)
    second.load_state_dict(first.state_dict())
    resumed = cls(second, **arguments, last_batch_iteration=schedule.last_batch_iteration)
    assert settings(second) == settings(first)
    assert trace_of(second, resumed, 9) == trace_of(first, schedule, 9)


def test_a_foreign_state_is_refused() -> None:
    schedule = WarmupLR(make_optimizer())
    with pytest.raises(
        ValueError, match="WarmupLR: a state has 'last_batch_iteration', this one has last_epoch"
    ):
        schedule.load_state_dict({"last_epoch": 3})
    with pytest.raises(
        ValueError, match="last_batch_iteration must be an integer of at least -1, not 'x'"
    ):
        schedule.load_state_dict({"last_batch_iteration": "x"})
    assert schedule.last_batch_iteration == -1


def test_a_new_schedule_takes_the_learning_rate_of_now() -> None:
    optimizer = make_optimizer(0.5)
    WarmupCosineLR(optimizer, 10, warmup_num_steps=2).step(5)
    optimizer.param_groups[0]["lr"] = 0.125
    WarmupLR(optimizer, warmup_num_steps=2).step(5)
    assert optimizer.param_groups[0]["lr"] == 0.125


# -- tensors ---------------------------------------------------------------------------------------


def test_a_tensor_stays_the_same_tensor() -> None:
    lr = torch.tensor(0.5)
    optimizer = make_optimizer(cls=lambda groups: torch.optim.Adam(groups[0]["params"], lr=lr))
    schedule = OneCycle(optimizer, 0.25, 0.75, cycle_first_step_size=2)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25
    schedule.step()
    assert lr.item() == 0.5
    beta1 = torch.tensor(0.1)
    optimizer.param_groups[0]["betas"] = (beta1, 0.999)
    schedule.step()
    assert lr.item() == 0.75
    assert optimizer.param_groups[0]["betas"][0] is beta1
    assert beta1.item() == pytest.approx(0.8)


def test_the_base_of_a_tensor_does_not_move_with_it() -> None:
    lr = torch.tensor(0.5)
    optimizer = make_optimizer(cls=lambda groups: torch.optim.Adam(groups[0]["params"], lr=lr))
    schedule = WarmupLR(optimizer, warmup_num_steps=2)
    assert lr.item() == 0.0
    schedule.step(2)
    assert lr.item() == 0.5


@pytest.mark.parametrize("cls", [WarmupLR, WarmupDecayLR, WarmupCosineLR])
def test_no_warm_up_begins_at_the_full_rate(cls: Any) -> None:
    optimizer = make_optimizer()
    full = optimizer.param_groups[0]["lr"]
    given = {} if cls is WarmupLR else {"total_num_steps": 10}
    schedule = cls(
        optimizer,
        warmup_num_steps=0,
        **given,
        **({} if cls is WarmupCosineLR else {"warmup_max_lr": full}),
    )
    assert optimizer.param_groups[0]["lr"] == full
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(full, rel=0.05)
    for _ in range(9):
        schedule.step()
    left = optimizer.param_groups[0]["lr"]
    assert left == full if cls is WarmupLR else left < 0.2 * full
