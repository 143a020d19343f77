"""The hook of dscore-pipeline (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core import entries
from ds_core.plugins import checks


@checks.gives(checks.named("builtins:str"))
def ds_pipeline_schedules() -> Mapping[str, entries.Ref]:  # type: ignore[empty-body]
    """Driver, by the name in ``pipeline.schedule``: reference to a
    `ds_pipeline.schedules.schedule.PipeSchedule`.

    Called as ``reference(micro_batches, stages, stage)``, for each stage, also by tools: it loads
    no torch.
    """
