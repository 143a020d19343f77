"""The declaration of old-check: rules for the whole config (torch-free)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from ds_core.config import Section
from ds_core.errors import Problem

if TYPE_CHECKING:
    from ds_core.config import RunConfig


class Settings(Section):
    """The section ``old_check``."""

    steepest: float = Field(0.1, gt=0, description="The largest learning rate that a config may have.")


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_check(config: RunConfig) -> Iterator[Problem]:
    """Asked when all sections were parsed. A problem has the key, what is wrong, and the fix."""
    settings = config.section("old_check")
    assert isinstance(settings, Settings)
    if not config.core.gradient_clipping:
        yield Problem("gradient_clipping", "gradients are not clipped", "set it, for example to 1.0")
    optimizer = config.core.optimizer
    lr = optimizer.params.get("lr") if optimizer is not None else None
    if isinstance(lr, float) and lr > settings.steepest:
        fix = f"set it to {settings.steepest} or less, or old_check.steepest higher"
        yield Problem("optimizer.params.lr", f"{lr} is above old_check.steepest", fix)
