"""From a schedule's name in the config to its object (torch-free)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ds_core.entries import resolve
from ds_core.errors import UsageError, did_you_mean
from ds_pipeline.schedules.planned import (
    InterleavedInferenceSchedule,
    InterleavedSchedule,
    ZeroBubbleSchedule,
)
from ds_pipeline.schedules.schedule import InferenceSchedule, PipeSchedule, TrainSchedule

if TYPE_CHECKING:
    from ds_core.plugins import Plugins

OWN = ("auto", "1f1b", "interleaved", "zero_bubble")
"""The names of dscore-pipeline's own schedules."""


def find_schedule(name: str, plugins: Plugins) -> Callable[..., Any] | None:
    """What makes the schedule `name` for one stage; None for those of `OWN`.

    The plugin that offers it takes part.

    Raises UsageError for a name that nobody offers.
    """
    if name in OWN:
        return None
    if ":" in name:
        made: Callable[..., Any] = resolve(name)
        return made
    offers = plugins.named("ds_pipeline_schedules", "pipeline_schedules")
    if (answer := offers.get(name.lower())) is None:
        known = [*OWN, *sorted(offers)]
        raise UsageError(
            f"no pipeline schedule is called {name!r}; {did_you_mean(name, known)} there are "
            f"{', '.join(known)}, and "
            f"'package.module:Class'{plugins.quarantined()}"
        )
    plugins.join(answer.plugin)
    offered: Callable[..., Any] = answer.resolve(answer.value, f"the pipeline schedule {name!r}")
    return offered


def make_schedule(
    name: str,
    micro_batches: int,
    stages: int,
    stage: int,
    chunks: int = 1,
    *,
    train: bool = True,
    make: Callable[..., Any] | None = None,
) -> PipeSchedule:
    """The schedule of one stage.

    name: of ``pipeline.schedule``; only training asks for it.
    make: see `find_schedule`.

    Raises UsageError for one that does not fit the chunks, or is no schedule.
    """
    if not train:
        if chunks > 1:
            return InterleavedInferenceSchedule(micro_batches, stages, stage, chunks)
        return InferenceSchedule(micro_batches, stages, stage)
    made: PipeSchedule
    if make is not None:
        made = make(micro_batches, stages, stage)
        if not isinstance(made, PipeSchedule):
            raise UsageError(
                f"pipeline.schedule: {name} gives a {type(made).__name__}, not a PipeSchedule"
            )
    elif name == "interleaved" or (name == "auto" and chunks > 1):
        return InterleavedSchedule(micro_batches, stages, stage, chunks)
    elif name == "zero_bubble":
        made = ZeroBubbleSchedule(micro_batches, stages, stage)
    else:
        made = TrainSchedule(micro_batches, stages, stage)
    if made.chunks != chunks:
        raise UsageError(
            f"pipeline.schedule: {type(made).__name__} is for {made.chunks} chunks per stage, the "
            "PipelineModule has "
            f"{chunks}"
        )
    return made
