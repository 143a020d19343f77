"""What this distribution offers to ds_core: the section ``pipeline``, its axis, its runner
(torch-free).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from ds_core.entries import Axis, Chart, CommandEntry, Phase, Transform
from ds_core.errors import Problem

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.engine import Runner
    from ds_core.plugins import Plugins


def ds_config() -> type[BaseModel]:
    """The section ``pipeline``."""
    from ds_pipeline.config import PipelineConfig

    return PipelineConfig


def ds_commands() -> Mapping[str, CommandEntry]:
    """``dscore pipeline``."""
    return {
        "pipeline": CommandEntry("ds_pipeline.command:app", "Prove and draw pipeline schedules.")
    }


def ds_charts(config: RunConfig, plugins: Plugins) -> Iterable[Chart]:
    """The timeline of the config's schedule."""
    from ds_pipeline.schedules.timeline import timeline

    return timeline(config, plugins)


def ds_check(config: RunConfig, plugins: Plugins) -> Iterable[Problem]:
    """The schedule is offered by somebody; and the caller cannot place the boundaries of a
    batch."""
    from ds_core.errors import UsageError
    from ds_pipeline.config import PipelineConfig
    from ds_pipeline.schedules.choose import OWN, find_schedule

    section = config.section(PipelineConfig)
    if section is None:
        return
    if not config.core.managed_gradient_accumulation:
        why = (
            "false is not possible with a pipeline: train_batch runs every micro-batch of a "
            "batch "
            "and then steps"
        )
        yield Problem("managed_gradient_accumulation", why, "leave it out")
    if section.schedule not in OWN and ":" not in section.schedule:
        try:
            find_schedule(section.schedule, plugins)
        except UsageError as error:
            yield Problem("pipeline.schedule", str(error))


def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:
    """``pp`` as the outermost axis: messages between stages are small."""
    from ds_pipeline.config import PipelineConfig

    section = config.section(PipelineConfig)
    stages = section.stages if section is not None else 1
    return [Axis("pp", stages if isinstance(stages, int) else 1, outermost=True)]


def ds_param_axes(name: str) -> Collection[str]:
    """Every stage has its own."""
    return ("pp",)


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """The model must be a PipelineModule that was built for this mesh."""

    def apply(model):  # type: ignore[no-untyped-def]
        from ds_pipeline.runner import prepare

        return prepare(model, ctx)

    return [Transform(Phase.SPLIT, apply)]


def ds_runner(ctx: Context) -> Runner | None:
    """Who carries out schedules."""
    from ds_pipeline.runner import PipelineRunner

    return PipelineRunner(ctx)
