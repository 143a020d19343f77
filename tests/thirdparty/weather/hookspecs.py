"""A hook of a stranger's kit: what the weather is like while a model trains (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ds_core.plugins.checks import gives, many

if TYPE_CHECKING:
    from ds_core.context import Context


@gives(many("builtins:str"))
def ds_weather(ctx: Context, hour: int) -> Iterable[str]:  # type: ignore[empty-body]
    """Hook: forecasts for an hour of the day. Every rank."""
