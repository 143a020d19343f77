"""The declaration of old-divided-layers: its section, its axis and its transform (torch-free)."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from ds_run_state.slices import SLICES
from pydantic import Field

from ds_core.config import Section
from ds_core.entries import Axis, Phase, Transform

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.context import Context


class Settings(Section):
    """The section ``old_divided_layers``."""

    size: int = Field(1, ge=1, description="How many ranks divide the layers.")
    pairs: list[tuple[str, str]] = Field([], description="Names of linear layers: up, and down that takes its outputs.")


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:
    """Without inside="dp": ranks along the axis are given the same samples."""
    settings = config.section("old_divided_layers")
    assert isinstance(settings, Settings)
    return [Axis("old_divided_layers", settings.size)]


def ds_param_axes(name: str, ctx: Context) -> Collection[str] | None:
    """The axis, for parameters of which each rank has a part; gradients, the norm and ZeRO follow from it."""
    slices = ctx.stash.get(SLICES) or {}
    return slices[name].axes if name in slices else None


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Phases run in this order: SPLIT, SUBSTITUTE, PRECISION, SHARD, RECOMPUTE, COMPILE."""
    from old_divided_layers.layers import divide

    settings = ctx.config.section("old_divided_layers")
    assert isinstance(settings, Settings)
    return [Transform(Phase.SHARD, functools.partial(divide, ctx=ctx, pairs=settings.pairs))]
