"""Difficulties: the numbers that DeepSpeed 0.19.8 computes."""

from __future__ import annotations

import pytest
from ds_data_sampling.curricula.config import Schedule
from ds_data_sampling.curricula.schedules import difficulty_at

from ds_core.errors import UsageError

# min_difficulty, max_difficulty, total_curriculum_step, difficulty_step, root_degree -> step:
# difficulty
GOLDEN: list[tuple[tuple[int, int, int, int, int], dict[int, int]]] = [
    (
        (8, 1024, 15000, 8, 1),
        {1: 8, 1500: 104, 3750: 256, 7500: 512, 14999: 1016, 15000: 1024, 15001: 1024},
    ),
    (
        (80, 2048, 1000, 8, 1),
        {1: 80, 100: 272, 250: 568, 500: 1064, 999: 2040, 1000: 2048, 1001: 2048},
    ),
    (
        (1, 100, 110000, 1, 2),
        {1: 1, 11000: 32, 27500: 50, 55000: 71, 109999: 99, 110000: 100, 110001: 100},
    ),
    ((16, 64, 10, 16, 3), {1: 32, 2: 32, 5: 48, 9: 48, 10: 64, 11: 64}),
    ((8, 64, 12, 16, 2), {1: 16, 2: 16, 3: 32, 6: 32, 11: 48, 12: 64, 13: 64}),
]


@pytest.mark.parametrize(("numbers", "expected"), GOLDEN)
def test_roots(numbers: tuple[int, int, int, int, int], expected: dict[int, int]) -> None:
    low, high, total, multiple, degree = numbers
    config = {"total_curriculum_step": total, "difficulty_step": multiple}
    kind = "fixed_linear" if degree == 1 else "fixed_root"
    if degree > 1:
        config["root_degree"] = degree
    schedule = Schedule.model_validate(
        {
            "min_difficulty": low,
            "max_difficulty": high,
            "schedule_type": kind,
            "schedule_config": config,
        }
    )
    schedule.check_schedule()
    assert {step: difficulty_at(schedule, step) for step in expected} == expected


def test_levels_and_functions() -> None:
    levels = Schedule.model_validate(
        {
            "min_difficulty": 1,
            "max_difficulty": 3,
            "schedule_type": "fixed_discrete",
            "schedule_config": {"difficulty": [1, 2, 3], "max_step": [5, 10]},
        }
    )
    assert [difficulty_at(levels, step) for step in range(1, 13)] == [1] * 5 + [2] * 5 + [3] * 2
    own = Schedule.model_validate(
        {"min_difficulty": 1, "max_difficulty": 9, "schedule_type": "custom"}
    )
    assert [difficulty_at(own, step, lambda step: step * step) for step in (1, 2, 3)] == [1, 4, 9]
    with pytest.raises(UsageError, match="no function"):
        difficulty_at(own, 1)
