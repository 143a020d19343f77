"""What this distribution offers to ds_core: the section ``progressive_layer_drop`` and its
transform (torch-free).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ds_core.config import Trait
from ds_core.entries import Phase, Ref, Transform
from ds_core.errors import Problem

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_progressive_layer_drop.config import ProgressiveLayerDropConfig


def ds_config() -> type[BaseModel]:
    """The section ``progressive_layer_drop``."""
    from ds_progressive_layer_drop.config import ProgressiveLayerDropConfig

    return ProgressiveLayerDropConfig


def ds_check(config: RunConfig) -> Iterable[Problem]:
    """A stage of a pipeline knows only its own layers."""
    if _section(config) is None or not config.has(Trait.DIVIDES_DEPTH):
        return []
    why = (
        "does not go with pipelines: a stage does not know how deep its layers are, and its "
        "forward is not called"
    )
    return [
        Problem(
            "progressive_layer_drop.enabled",
            why,
            "switch it off, or train without a PipelineModule",
        )
    ]


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Forward receives theta, or layers are skipped: outermost, so that recomputation is inside."""
    if (section := _section(ctx.config)) is None:
        return []

    def apply(model):  # type: ignore[no-untyped-def]
        from ds_progressive_layer_drop.dropping import drop_layers

        return drop_layers(model, ctx, section)

    return [Transform(Phase.COMPILE, apply)]


def ds_engine_methods() -> Mapping[str, Ref]:
    """``engine.get_pld_theta()``."""
    return {"get_pld_theta": "ds_progressive_layer_drop.plugin:get_pld_theta"}


def get_pld_theta(engine: Any) -> float:
    """theta of the running step; 1 while the section is off, where no layer is dropped."""
    from ds_progressive_layer_drop.schedule import theta_at

    section = _section(engine.config)
    return 1.0 if section is None else theta_at(engine.global_steps, section.theta, section.gamma)


def _section(config: RunConfig) -> ProgressiveLayerDropConfig | None:
    from ds_progressive_layer_drop.config import ProgressiveLayerDropConfig

    section = config.section(ProgressiveLayerDropConfig)
    return section if section is not None and section.enabled else None
