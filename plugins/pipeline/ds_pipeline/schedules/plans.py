"""What one stage does in a batch: the instructions of its schedule, proved once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_core.errors import UsageError
from ds_pipeline.schedules import schedule as s
from ds_pipeline.schedules.choose import find_schedule, make_schedule
from ds_pipeline.schedules.validate import ScheduleError, check

if TYPE_CHECKING:
    from ds_core.plugins import Plugins


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The batch of one stage."""

    commands: list[s.PipeInstruction]
    """In the order in which they are carried out."""

    in_flight: int
    """How many messages of a kind this stage may have under way, so that no stage waits forever."""


class StagePlans:
    """The plans of one stage, each made and checked when it is first needed."""

    def __init__(self, name: str, plugins: Plugins, stages: int, stage: int, chunks: int) -> None:
        # The name in ``pipeline.schedule``.
        self._name = name
        self._stages = stages
        self._stage = stage
        self._chunks = chunks
        # What makes a plugin's schedule; None: one of dscore-pipeline's.
        self._make_own = find_schedule(name, plugins)
        # Plans by (number of micro-batches, whether they are trained on).
        self._plans: dict[tuple[int, bool], StagePlan] = {}

    def get(self, count: int, *, train: bool) -> StagePlan:
        """The plan for `count` micro-batches. Raises UsageError for a schedule that is wrong."""
        key = (count, train)
        if key not in self._plans:
            own = self._make(count, train, self._stage)
            in_flight = self._prove(count, train, type(own).__name__)
            self._plans[key] = StagePlan([what for step in own for what in step], in_flight)
        return self._plans[key]

    def _make(self, count: int, train: bool, stage: int) -> s.PipeSchedule:
        return make_schedule(
            self._name,
            count,
            self._stages,
            stage,
            self._chunks,
            train=train,
            make=self._make_own,
        )

    def _prove(self, count: int, train: bool, name: str) -> int:
        """How many messages may be under way from a stage."""

        def make(stage: int) -> s.PipeSchedule:
            return self._make(count, train, stage)

        try:
            most = max(check(make, train=train).activations) + 1
            # A stage that sends more than it may waits until older messages are received. Where that
            # could end in a deadlock more are allowed, up to all of the batch.
            while most < count * self._chunks:
                try:
                    check(make, train=train, capacity=most)
                    break
                except ScheduleError:
                    most *= 2
        except ScheduleError as error:
            raise UsageError(f"pipeline.schedule: {name} is wrong: {error}") from error
        return most
