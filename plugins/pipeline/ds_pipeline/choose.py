"""From a schedule's name in the config to its object (torch-free)."""

from __future__ import annotations

from ds_core.entries import resolve
from ds_core.errors import UsageError
from ds_pipeline.planned import InterleavedInferenceSchedule, InterleavedSchedule, ZeroBubbleSchedule
from ds_pipeline.schedule import InferenceSchedule, PipeSchedule, TrainSchedule

__all__ = ["make_schedule"]


def make_schedule(
    name: str, micro_batches: int, stages: int, stage: int, chunks: int = 1, *, train: bool = True
) -> PipeSchedule:
    """The schedule of one stage. name: of ``pipeline.schedule``; only training asks for it.

    Raises UsageError for one that does not fit the chunks, or is no schedule.
    """
    if not train:
        if chunks > 1:
            return InterleavedInferenceSchedule(micro_batches, stages, stage, chunks)
        return InferenceSchedule(micro_batches, stages, stage)
    made: PipeSchedule
    if name == "interleaved" or (name == "auto" and chunks > 1):
        return InterleavedSchedule(micro_batches, stages, stage, chunks)
    if name == "zero_bubble":
        made = ZeroBubbleSchedule(micro_batches, stages, stage)
    elif name in ("auto", "1f1b"):
        made = TrainSchedule(micro_batches, stages, stage)
    else:
        if ":" not in name:
            raise UsageError(
                f"schedule {name!r} is unknown; use 'auto', '1f1b', 'interleaved', 'zero_bubble' or "
                "'package.module:Class'"
            )
        made = resolve(name)(micro_batches, stages, stage)
        if not isinstance(made, PipeSchedule):
            raise UsageError(f"pipeline.schedule: {name} gives a {type(made).__name__}, not a PipeSchedule")
    if made.chunks != chunks:
        raise UsageError(
            f"pipeline.schedule: {type(made).__name__} is for {made.chunks} chunks per stage, the PipelineModule has "
            f"{chunks}"
        )
    return made
