"""How a difficulty grows with the steps: plain functions, without torch."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_data_sampling.curricula.config import Schedule


def difficulty_at(schedule: Schedule, step: int, custom: Callable[[int], int] | None = None) -> int:
    """The difficulty of the optimizer step `step`, which counts from 1.

    schedule: a complete one (`Schedule.check_schedule`).
    custom: the function of a ``custom`` schedule;

    UsageError where it is missing.
    """
    numbers = schedule.schedule_config
    low = schedule.min_difficulty
    high = schedule.max_difficulty
    assert low is not None and high is not None
    if schedule.schedule_type == "custom":
        if custom is None:
            raise UsageError("schedule_type is custom and it has no function yet")
        return custom(step)
    if schedule.schedule_type == "fixed_discrete":
        assert numbers.difficulty is not None and numbers.max_step is not None
        return fixed_discrete(step, numbers.difficulty, numbers.max_step)
    assert numbers.total_curriculum_step is not None and numbers.difficulty_step is not None
    degree = numbers.root_degree if schedule.schedule_type == "fixed_root" else 1
    assert degree is not None
    return fixed_root(
        step, low, high, numbers.total_curriculum_step, numbers.difficulty_step, degree
    )


def fixed_root(step: int, low: int, high: int, total: int, multiple: int, degree: int = 1) -> int:
    """floor(low + (high - low) · (step / total)^(1/degree)), rounded down to a multiple of
    `multiple`, at most `high`.

    It is at least the first such multiple from `low` on: 8, rounded down to a multiple of 16, would
    be no length.
    """
    grown = math.floor(math.pow(step / total, 1.0 / degree) * (high - low) + low)
    floor = -(-low // multiple) * multiple
    return min(max(grown - grown % multiple, floor), high)


def fixed_discrete(step: int, difficulties: list[int], last_steps: list[int]) -> int:
    """The difficulty in whose turn `step` is; last_steps: the last step of each but the last
    difficulty.
    """
    return difficulties[bisect_left(last_steps, step)]
