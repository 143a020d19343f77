"""The sections of dscore-inference (torch-free).

``hybrid_engine``: one engine that trains and generates in turn. ``weight_quantization``: weights of
linear layers in 8 or 4 bits, for inference. ``inference``: the config of `init_inference`, so that
tools check it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ds_core.config import Trait
from ds_core.entries import Phase, Transform
from ds_core.errors import ConfigError, Problem
from ds_inference.axes import tp_size
from ds_inference.config import DeepSpeedInferenceConfig, WeightQuantization
from ds_inference.hybrid_config import HybridEngine

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.entries import Ref
    from ds_core.plugins import Plugins


def ds_config() -> Mapping[str, type[BaseModel]]:
    """The sections' models."""
    return {
        "hybrid_engine": HybridEngine,
        "inference": DeepSpeedInferenceConfig,
        "weight_quantization": WeightQuantization,
    }


def ds_check(config: RunConfig, plugins: Plugins) -> Iterable[Problem]:
    """Keys that exclude each other, and layers that ranks divide."""
    size = tp_size(config, plugins)
    yield from _hybrid_problems(config, size)
    section = config.section(WeightQuantization)
    if section is not None and section.enabled and size > 1:
        what = "layers that tensor parallelism divides are not quantised here"
        fix = "use init_inference with tensor_parallel and dtype int8, or remove it"
        yield Problem("weight_quantization", what, fix)


def _hybrid_problems(config: RunConfig, size: int) -> Iterable[Problem]:
    section = config.section(HybridEngine)
    if section is None or not section.enabled:
        return
    path = "hybrid_engine.enable_cuda_graph"
    if section.enable_cuda_graph and section.release_inference_cache:
        yield Problem(
            path,
            "a graph reads the cache where it was recorded",
            "set release_inference_cache to false",
        )
    if section.enable_cuda_graph and config.has(Trait.RELEASES_WEIGHTS):
        yield Problem(
            path,
            "stage 3 gathers weights again, and a graph reads them where they were",
            "set stage 0 to 2",
        )
    if section.inference_tp_size not in (1, size):
        yield Problem(
            "hybrid_engine.inference_tp_size",
            f"{section.inference_tp_size}, but layers are divided over {size} in training, and "
            "stay as they are",
            f"set it to {size}"
            + ("" if size > 1 else ", or divide training too with tensor_parallel.autotp_size"),
        )


def _on(ctx: Context) -> bool:
    section = ctx.config.section(HybridEngine)
    return section is not None and section.enabled


def ds_engine_methods() -> Mapping[str, Ref]:
    """``engine.generate``, which is the module's while the section is off, and
    ``engine.generation_stats``.
    """
    return {name: f"ds_inference.hybrid:{name}" for name in ("generate", "generation_stats")}


def ds_open(ctx: Context) -> None:
    """A graph is recorded on CUDA alone."""
    section = ctx.config.section(HybridEngine)
    if section is None or not section.enabled:
        return
    if section.enable_cuda_graph and (kind := ctx.accelerator.device_type) != "cuda":
        problem = Problem(
            "hybrid_engine.enable_cuda_graph", f"the model is on {kind}", "leave the key out"
        )
        raise ConfigError([problem], ctx.config.origin)


def ds_metrics(ctx: Context, step: int) -> Mapping[str, float]:
    """What was generated since the last step, if anything."""
    if not _on(ctx):
        return {}
    from ds_inference.hybrid import metrics

    return metrics(ctx)


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Quantise before anything looks at the layers."""
    section = ctx.config.section(WeightQuantization)
    if section is None or not section.enabled:
        return ()
    from ds_inference.preparing import quantise_for_run

    return (Transform(Phase.SUBSTITUTE, lambda model: quantise_for_run(model, section, ctx)),)
