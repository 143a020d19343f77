"""The kit: it asks the plugins of a run, as the core asks for its own hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds_core.engine import Engine

__all__ = ["forecasts"]


def forecasts(engine: Engine, hour: int) -> list[str]:
    """What all plugins of the run say, in plugin order."""
    return [
        text
        for answer in engine.ctx.plugins.ask("ds_weather", ctx=engine.ctx, hour=hour)
        for text in answer.value
    ]
