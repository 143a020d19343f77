"""The declaration of old-transform: its section and its transform (torch-free)."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from ds_core.config import Section
from ds_core.entries import Phase, Transform

if TYPE_CHECKING:
    from ds_core.context import Context


class Settings(Section):
    """The section ``old_transform``."""

    modules: list[str] = Field([], description="Names of modules whose forward is run again in backward.")


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Phases run in this order: SPLIT, SUBSTITUTE, PRECISION, SHARD, RECOMPUTE, COMPILE."""
    from old_transform.transform import recompute

    settings = ctx.config.section("old_transform")
    assert isinstance(settings, Settings)
    return [Transform(Phase.RECOMPUTE, functools.partial(recompute, names=settings.modules, undo=ctx.undo))]
