"""The section ``data_efficiency``: which samples come when, and in which batches (torch-free)."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.engine import Loader, LoaderRequest
    from ds_core.entries import Chart, CommandEntry, Ref, Transform
    from ds_core.errors import Problem
    from ds_core.plugins import Plugins
    from ds_data_sampling.config import DataEfficiency, DataSampling


def ds_config() -> type[DataEfficiency]:
    """The section ``data_efficiency``."""
    from ds_data_sampling.config import DataEfficiency

    return DataEfficiency


def ds_check(config: RunConfig, plugins: Plugins) -> Iterable[Problem]:
    """Layers that drop tokens must see whole sequences, and all of them."""
    from ds_core.config import Trait
    from ds_core.errors import Problem
    from ds_data_sampling.config import DataEfficiency

    section = config.section(DataEfficiency)
    if section is None or section.random_ltd is None:
        return []
    path = "data_efficiency.data_routing.random_ltd.enabled"
    problems = []
    if config.has(Trait.DIVIDES_DEPTH):
        why = "does not go with pipelines: a stage does not know which layers it has"
        problems.append(Problem(path, why, "switch it off, or train without a PipelineModule"))
    for answer in plugins.ask("ds_mesh_axes", config=config):
        if any(axis.same_batch and axis.size > 1 for axis in answer.value):
            why = (
                f"does not go with {answer.plugin.name}: a rank does not have the tokens that "
                "layers choose among"
            )
            problems.append(Problem(path, why, "switch one of them off"))
    return problems


def ds_commands() -> Mapping[str, CommandEntry]:
    """``dscore curriculum``."""
    from ds_core.entries import CommandEntry

    return {
        "curriculum": CommandEntry(
            "ds_data_sampling.command:app", "Measure datasets, and look at curricula."
        )
    }


def ds_charts(config: RunConfig) -> Iterable[Chart]:
    """The difficulties of the config's curriculum."""
    from ds_data_sampling.config import DataEfficiency
    from ds_data_sampling.curricula.drawing import charts

    section = config.section(DataEfficiency)
    return charts(section) if section is not None else []


def ds_engine_methods() -> Mapping[str, Ref]:
    """Functions of the user's for the loader, under DeepSpeed's names; the schedule of dropped
    tokens.
    """
    return {
        "random_ltd_schedule": "ds_data_sampling.deepspeed.names:random_ltd_schedule",
        "set_custom_curriculum_learning_schedule": "ds_data_sampling.callbacks:set_custom_curriculum_learning_schedule",
        "set_data_post_process_func": "ds_data_sampling.callbacks:set_data_post_process_func",
    }


def _section(ctx: Context) -> DataEfficiency:
    from ds_data_sampling.config import DataEfficiency

    return ctx.config.section(DataEfficiency) or DataEfficiency()


def _sampling(ctx: Context) -> DataSampling | None:
    """The sub-section data_sampling where it is in use."""
    return _section(ctx).sampling


def ds_loader(ctx: Context, request: LoaderRequest) -> Loader | None:
    """The loader of training data, where the user has no sampler."""
    if _sampling(ctx) is None or request.route != "train" or request.sampler is not None:
        return None
    from ds_data_sampling.callbacks import callbacks_of
    from ds_data_sampling.loader import make_loader

    callbacks_of(ctx).loads = True
    return make_loader(ctx, request, _section(ctx))


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Weights of losses; packed rows, which need no cache; layers that drop tokens."""
    from ds_core.entries import Phase, Transform

    sampling = _sampling(ctx)
    section = _section(ctx)
    if sampling is not None and sampling.loss_weights != "none":
        from ds_data_sampling.loss_weights import weigh_losses

        yield Transform(Phase.SUBSTITUTE, functools.partial(weigh_losses, undo=ctx.undo))
    if sampling is not None and sampling.packing.enabled:
        from ds_data_sampling.batching.packed_models import leave_out_cache

        yield Transform(Phase.SUBSTITUTE, functools.partial(leave_out_cache, undo=ctx.undo))
    if (routing := section.random_ltd) is not None:

        def drop(model):  # type: ignore[no-untyped-def]
            from ds_data_sampling.random_ltd import drop_tokens

            return drop_tokens(model, ctx, routing, section.seed)

        yield Transform(Phase.COMPILE, drop)  # outermost, so that recomputation is inside


def ds_step_begin(ctx: Context, step: int) -> None:
    """With batches by tokens the learning rate of a step follows its number of samples; is there a
    loader at all?
    """
    if (sampling := _sampling(ctx)) is None:
        return
    from ds_data_sampling.callbacks import warn_unused

    warn_unused(ctx)
    if not sampling.dynamic_batching.enabled:
        return
    if sampling.dynamic_batching.lr_scaling_method != "none":
        from ds_data_sampling.lr_scaling import begin_step

        begin_step(ctx)


def ds_metrics(ctx: Context, step: int) -> Mapping[str, float]:
    """The difficulties of the last batch, by metric of the curriculum."""
    from ds_data_sampling.callbacks import callbacks_of

    return {
        f"Train/Curriculum/{name}": float(value)
        for name, value in callbacks_of(ctx).difficulties.items()
    }
