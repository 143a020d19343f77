"""Schedules of a difficulty, the metrics that have one, and the section ``curriculum_learning``
(torch-free).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from ds_core.config import Section, option

Count = Annotated[int, Field(gt=0)]
NEEDS = {
    "fixed_linear": ("total_curriculum_step", "difficulty_step"),
    "fixed_root": ("total_curriculum_step", "difficulty_step", "root_degree"),
    "fixed_discrete": ("difficulty", "max_step"),
    "custom": (),
}
"""Type of a schedule -> the keys of ``schedule_config`` that it needs; others are an error."""


class ScheduleConfig(Section):
    """The numbers of a schedule; which of them, depends on its type."""

    total_curriculum_step: int | None = option(
        None, "Steps until the highest difficulty; fixed_linear and fixed_root.", gt=0
    )
    difficulty_step: int | None = option(
        None,
        "Difficulties are rounded down to a multiple of this; fixed_linear and fixed_root.",
        gt=0,
    )
    root_degree: int | None = option(
        None,
        "Degree of the root: 2 is the square root, which grows fast at first; fixed_root.",
        gt=0,
    )
    difficulty: list[int] | None = option(
        None, "The difficulties, one after the other; fixed_discrete.", min_length=1
    )
    max_step: list[Count] | None = option(
        None, "Last step of each difficulty but the last; fixed_discrete.", min_length=1
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.difficulty is not None and self.max_step is not None:
            if len(self.max_step) != len(self.difficulty) - 1:
                raise ValueError(
                    f"max_step has {len(self.max_step)} entries and difficulty has "
                    f"{len(self.difficulty)}; "
                    "max_step needs one fewer"
                )
            if any(b <= a for a, b in zip(self.max_step, self.max_step[1:], strict=False)):
                raise ValueError("max_step must increase")
        return self


class Schedule(Section):
    """A difficulty that grows with the steps."""

    min_difficulty: int | None = option(None, "Difficulty at the first step.", ge=0)
    max_difficulty: int | None = option(None, "Highest difficulty.", gt=0)
    schedule_type: Literal["fixed_linear", "fixed_root", "fixed_discrete", "custom"] | None = (
        option(
            None,
            "How the difficulty grows: fixed_linear, fixed_root, fixed_discrete, or custom (yours).",
        )
    )
    schedule_config: ScheduleConfig = option(ScheduleConfig(), "The numbers of the schedule.")

    def check_schedule(self) -> None:
        """Raise ValueError unless the schedule is complete."""
        for key in ("min_difficulty", "max_difficulty", "schedule_type"):
            if getattr(self, key) is None:
                raise ValueError(f"{key} must be given")
        assert (
            self.min_difficulty is not None
            and self.max_difficulty is not None
            and self.schedule_type is not None
        )
        if self.min_difficulty > self.max_difficulty:
            raise ValueError(
                f"min_difficulty {self.min_difficulty} is more than max_difficulty "
                f"{self.max_difficulty}"
            )
        numbers = self.schedule_config
        needed = NEEDS[self.schedule_type]
        given = {key for key in ScheduleConfig.model_fields if getattr(numbers, key) is not None}
        if missing := [key for key in needed if key not in given]:
            raise ValueError(
                f"schedule_type {self.schedule_type} needs schedule_config.{missing[0]}"
            )
        if (
            numbers.difficulty is not None
            and "difficulty" in needed
            and max(numbers.difficulty) > self.max_difficulty
        ):
            raise ValueError(
                f"schedule_config.difficulty goes up to {max(numbers.difficulty)}, "
                f"more than max_difficulty {self.max_difficulty}"
            )

    def schedule_remarks(self) -> Iterable[tuple[str, str]]:
        """Keys of another schedule, and a step that is bad for tensor cores."""
        if self.schedule_type is None:
            return
        numbers = self.schedule_config
        needed = NEEDS[self.schedule_type]
        for key in ScheduleConfig.model_fields:
            if getattr(numbers, key) is not None and key not in needed:
                yield (
                    f"schedule_config.{key}",
                    f"has no effect with schedule_type {self.schedule_type}",
                )


class Metric(Schedule):
    """A metric of samples, and the schedule of its difficulty."""

    index_to_sample_path: str | None = option(
        None,
        "File of the samples in order of the metric, written by `dscore curriculum analyze`.",
        min_length=1,
    )
    index_to_metric_path: str | None = option(
        None, "File of the metric's values, written by `dscore curriculum analyze`.", min_length=1
    )
    difficulty_type: Literal["value", "percentile"] | None = option(
        None,
        "What a difficulty means: a value of the metric, or the easiest so many percent of the "
        "samples.",
    )
    clustering_type: Literal["schedule_based", "single_cluster"] | None = option(
        None,
        "schedule_based: samples above the difficulty wait; single_cluster: all samples come at "
        "any time, and the "
        "difficulty is for a function that changes batches.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.check_schedule()
        if self.clustering_type is None:
            raise ValueError("clustering_type must be given: schedule_based or single_cluster")
        if self.clustering_type == "single_cluster":
            return self
        for key in ("difficulty_type", "index_to_sample_path", "index_to_metric_path"):
            if getattr(self, key) is None and (
                key != "index_to_metric_path" or self.difficulty_type == "value"
            ):
                raise ValueError(f"clustering_type schedule_based needs {key}")
        if self.difficulty_type == "percentile" and (self.max_difficulty or 0) > 100:
            raise ValueError(
                f"max_difficulty {self.max_difficulty} is no percentile; the highest is 100"
            )
        return self


class Curriculum(Section):
    """Samples by difficulty: easy ones first."""

    enabled: bool = option(False, "Choose samples by difficulty.")
    data_cluster_path: str | None = option(
        None,
        "Folder for the samples of each difficulty, memory-mapped from there; null: they are kept "
        "in memory. It is "
        "used with two and more schedule_based metrics; every rank must be able to write into it.",
        min_length=1,
    )
    curriculum_metrics: dict[str, Metric] = option(
        {}, "Metric, by a name of your choice -> its files and schedule."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enabled and not self.curriculum_metrics:
            raise ValueError("curriculum_metrics must be given when curriculum_learning is enabled")
        return self


class LegacyCurriculum(Schedule):
    """A curriculum of sequence lengths, which the model's forward is given."""

    enabled: bool = option(False, "Pass the length of this step to the model.")
    curriculum_type: Literal["seqlen"] = option(
        "seqlen", "What the difficulty is: seqlen, which is passed to forward as curriculum_seqlen."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.enabled:
            self.check_schedule()
            if self.min_difficulty == 0:
                raise ValueError(
                    "min_difficulty is 0, and sequences need a position; give the shortest length"
                )
        return self

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """Keys of another schedule, and lengths that are bad for tensor cores."""
        if not self.enabled:
            return
        yield from self.schedule_remarks()
        if (step := self.schedule_config.difficulty_step or 8) % 8:
            yield (
                "schedule_config.difficulty_step",
                f"is {step}: lengths that are no multiple of 8 are slow on GPUs",
            )
