"""What this distribution offers to ds_core: the section ``compression_training`` (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ds_core.entries import Phase, Transform

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_compression.config import CompressionConfig
    from ds_core.context import Context
    from ds_core.gradients import Gradients


def ds_config() -> type[BaseModel]:
    """The section ``compression_training``."""
    from ds_compression.config import CompressionConfig

    return CompressionConfig


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Layers are compressed, unless ``init_compression`` has done it, and follow the engine's
    steps.
    """
    if (section := _section(ctx)) is None:
        return []

    def apply(model):  # type: ignore[no-untyped-def]
        from ds_compression.training import prepare

        return prepare(model, section, ctx)

    return [Transform(Phase.SUBSTITUTE, apply)]


def ds_gradients(ctx: Context, gradients: Gradients) -> None:
    """Scores of snip_momentum follow the gradients, and ranges of inputs what was seen.

    Collective.
    """
    from ds_compression.training import after_backward

    after_backward(ctx, gradients)


def ds_checkpoint_loaded(ctx: Context) -> None:
    """Masks and ranges have other values now."""
    from ds_compression.training import loaded

    loaded(ctx)


def ds_checkpointables(ctx: Context) -> Mapping[str, Any]:
    """The scores of snip_momentum."""
    from ds_compression.training import kept_state

    return kept_state(ctx)


def _section(ctx: Context) -> CompressionConfig | None:
    from ds_compression.config import CompressionConfig

    return ctx.config.section(CompressionConfig)
