"""The ``scheduler.params`` of each schedule (torch-free).

The schedules themselves check list lengths.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_core.config import Section, option

Rate = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0)]
PerGroup = Rate | list[Rate]


class _ScheduleParams(Section):
    """What every schedule takes."""

    last_batch_iteration: int = option(
        -1,
        "Index of the last step that was taken; -1 starts from the beginning. Loading a checkpoint "
        "restores it.",
        ge=-1,
    )


class LRRangeTestParams(_ScheduleParams):
    """``scheduler.params`` of LRRangeTest."""

    lr_range_test_min_lr: PerGroup = option(
        1e-3, "Learning rate at the start; one number, or one per parameter group."
    )
    lr_range_test_step_size: int = option(
        2000, "Steps in which the learning rate grows by one step rate.", gt=0
    )
    lr_range_test_step_rate: float = option(
        1.0, "Growth per step size, as a multiple of the learning rate at the start."
    )
    lr_range_test_staircase: bool = option(
        False, "Grow only at the end of each step size instead of at every step."
    )


class OneCycleParams(_ScheduleParams):
    """``scheduler.params`` of OneCycle."""

    cycle_min_lr: PerGroup = option(
        ..., "Lower learning rate of the cycle; one number, or one per parameter group."
    )
    cycle_max_lr: PerGroup = option(
        ..., "Upper learning rate of the cycle; one number, or one per parameter group."
    )
    decay_lr_rate: float = option(
        0.0, "After the cycle: the learning rate is divided by 1 + this per decay step size.", ge=0
    )
    cycle_first_step_size: int = option(2000, "Steps of the rising half.", gt=0)
    cycle_second_step_size: Count | None = option(
        None, "Steps of the falling half; null: as many as the rising half."
    )
    cycle_first_stair_count: int = option(0, "Stairs in the rising half; 0: a straight line.", ge=0)
    cycle_second_stair_count: Count | None = option(
        None, "Stairs in the falling half; null: as many as in the rising half."
    )
    decay_step_size: int = option(0, "Steps per unit of decay after the cycle; 0: no decay.", ge=0)
    cycle_momentum: bool = option(
        True, "Cycle the first beta against the learning rate, and set the second to 0.99."
    )
    cycle_min_mom: PerGroup = option(
        0.8, "Lower momentum of the cycle; one number, or one per parameter group."
    )
    cycle_max_mom: PerGroup = option(
        0.9, "Upper momentum of the cycle; one number, or one per parameter group."
    )
    decay_mom_rate: float = option(
        0.0, "After the cycle: the momentum is multiplied by 1 + this per decay step size.", ge=0
    )


class _WarmupParams(_ScheduleParams):
    """What the warm-up schedules share."""

    warmup_num_steps: int = option(1000, "Steps of the warm-up, at least 2; 0: none.", ge=0)
    warmup_type: Literal["log", "linear"] = option("log", "Shape of the warm-up: log or linear.")


class WarmupLRParams(_WarmupParams):
    """``scheduler.params`` of WarmupLR."""

    warmup_min_lr: PerGroup = option(
        0.0, "Learning rate at the start; one number, or one per parameter group."
    )
    warmup_max_lr: PerGroup | None = option(
        None,
        "Learning rate after the warm-up; one number, one per parameter group, or null for each "
        "group's own.",
    )


class WarmupDecayLRParams(_WarmupParams):
    """``scheduler.params`` of WarmupDecayLR."""

    total_num_steps: int = option(..., "Steps of the schedule, warm-up included.", gt=0)
    warmup_min_lr: PerGroup = option(
        0.0, "Learning rate at the start and at the end; one number, or one per parameter group."
    )
    warmup_max_lr: PerGroup | None = option(
        1e-3,
        "Learning rate after the warm-up; one number, one per parameter group, or null for each "
        "group's own.",
    )


class WarmupCosineLRParams(_WarmupParams):
    """``scheduler.params`` of WarmupCosineLR."""

    total_num_steps: int = option(..., "Steps of the schedule, warm-up included.", gt=0)
    warmup_min_ratio: PerGroup = option(
        0.0,
        "Share of each group's own learning rate at the start of the warm-up; one number, or one "
        "per parameter group.",
    )
    cos_min_ratio: float = option(1e-4, "Share of each group's own learning rate at the end.", ge=0)
