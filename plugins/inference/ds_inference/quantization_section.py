"""The section ``weight_quantization``: weights of linear layers in 8 or 4 bits, for inference (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ds_core.entries import Phase, Transform
from ds_core.errors import Problem
from ds_inference.axes import tp_size
from ds_inference.config import WeightQuantization

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.plugins import Plugins

__all__ = ["ds_check", "ds_config", "ds_transforms"]


def ds_config() -> type[BaseModel]:
    """The section's model."""
    return WeightQuantization


def ds_check(config: RunConfig, plugins: Plugins) -> Iterable[Problem]:
    """Layers that ranks divide are cut as they are trained."""
    section = config.section(WeightQuantization)
    if section is None or not section.enabled:
        return
    if tp_size(config, plugins) > 1:
        what = "layers that tensor parallelism divides are not quantised here"
        yield Problem(
            "weight_quantization", what, "use init_inference with tensor_parallel and dtype int8, or remove it"
        )


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Quantise before anything looks at the layers."""
    section = ctx.config.section(WeightQuantization)
    if section is None or not section.enabled:
        return ()
    from ds_inference.preparing import quantise_for_run

    return (Transform(Phase.SUBSTITUTE, lambda model: quantise_for_run(model, section, ctx)),)
