"""The declaration of old-gradients: elements of gradients are limited (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from ds_core.config import Section

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.gradients import Gradients


class Settings(Section):
    """The section ``old_gradients``."""

    limit: float = Field(gt=0, description="The largest absolute value of an element of a gradient.")


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_gradients(ctx: Context, gradients: Gradients) -> None:
    """A gradient is its tensor times ``gradients.factor``; the tensor is changed in place."""
    settings = ctx.config.section("old_gradients")
    assert isinstance(settings, Settings)
    limit = settings.limit / gradients.factor
    for shard in gradients.shards:
        shard.tensor.clamp_(-limit, limit)
