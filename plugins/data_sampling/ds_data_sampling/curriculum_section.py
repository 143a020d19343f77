"""The section ``curriculum_learning``: a length of sequences that grows with the steps
(torch-free).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.engine import RunningEngine
    from ds_core.entries import Chart, Ref, Transform
    from ds_data_sampling.curricula.config import LegacyCurriculum


def ds_config() -> type[LegacyCurriculum]:
    """The section ``curriculum_learning``."""
    from ds_data_sampling.curricula.config import LegacyCurriculum

    return LegacyCurriculum


def ds_charts(config: RunConfig) -> Iterable[Chart]:
    """The lengths of the config's steps."""
    from ds_data_sampling.curricula.config import LegacyCurriculum
    from ds_data_sampling.curricula.drawing import charts

    section = config.section(LegacyCurriculum)
    return charts(section) if section is not None else []


def _switched_on(ctx: Context) -> LegacyCurriculum | None:
    from ds_data_sampling.curricula.config import LegacyCurriculum

    section = ctx.config.section(LegacyCurriculum)
    return section if section is not None and section.enabled else None


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """The model is given the length of each step, or inputs of no more positions."""
    if (section := _switched_on(ctx)) is None:
        return []
    from ds_core.entries import Phase, Transform

    def apply(model: nn.Module) -> nn.Module:
        from ds_data_sampling.curricula.seqlen import limit_lengths

        return limit_lengths(model, ctx, section)

    # when pipelines and divided sequences have their hooks
    return [Transform(Phase.RECOMPUTE, apply)]


def ds_engine_methods() -> Mapping[str, Ref]:
    """``curriculum_seqlen``; and the way to give a custom schedule, which the other section gives
    too.
    """
    return {
        "curriculum_seqlen": "ds_data_sampling.curriculum_section:curriculum_seqlen",
        "set_custom_curriculum_learning_schedule": "ds_data_sampling.callbacks:set_custom_curriculum_learning_schedule",
    }


def curriculum_seqlen(engine: RunningEngine) -> int:
    """The length of sequences in the coming step, or the one under way."""
    if (section := _switched_on(engine.ctx)) is None:
        from ds_core.errors import UsageError

        raise UsageError(
            "engine.curriculum_seqlen: the section curriculum_learning is switched off"
        )
    from ds_data_sampling.curricula.seqlen import seqlen_at

    return seqlen_at(engine.ctx, section, engine.global_steps + 1)


def ds_metrics(ctx: Context, step: int) -> Mapping[str, float]:
    """The length of the step that is done."""
    if (section := _switched_on(ctx)) is None:
        return {}
    from ds_data_sampling.curricula.seqlen import seqlen_at

    return {"Train/Curriculum/seqlen": float(seqlen_at(ctx, section, step + 1))}
