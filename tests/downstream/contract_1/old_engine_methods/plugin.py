"""The declaration of old-engine-methods: methods of the engine (torch-free)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ds_core.config import Section

if TYPE_CHECKING:
    from ds_core.context import Context


class Settings(Section):
    """The section ``old_engine_methods``; it has no keys."""


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_engine_methods(ctx: Context) -> Mapping[str, Callable[..., Any]]:
    """By name: functions whose first argument is the engine. A name that the engine has is an error."""
    from old_engine_methods.methods import count_parameters

    return {"count_parameters": count_parameters}
