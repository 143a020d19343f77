"""A stranger's observer: remembers the last events, and prints them when an exception comes."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ds_core.config import Section
from ds_core.context import StashKey

if TYPE_CHECKING:
    from ds_core.context import Context

EVENTS = StashKey[deque[str]]("the last events")


class Recorder(Section):
    """The section ``flight_recorder``."""

    events: int = Field(20, ge=1, description="How many events to remember.")
    every: int = Field(
        1, ge=1, description="Steps from one whose phases are remembered to the next."
    )


def ds_config() -> type[Recorder]:
    """The model of section ``flight_recorder``."""
    return Recorder


def _add(ctx: Context, event: str) -> None:
    if EVENTS not in ctx.stash:
        ctx.stash[EVENTS] = deque(maxlen=ctx.config.section("flight_recorder").events)  # type: ignore[union-attr]
    ctx.stash[EVENTS].append(event)


def ds_listens(ctx: Context) -> Mapping[str, int]:
    """In other steps the phases cost nothing."""
    every = ctx.config.section("flight_recorder").every  # type: ignore[union-attr]
    return {"ds_phase_begin": every, "ds_phase_end": every}


def ds_phase_begin(ctx: Context, phase: str) -> None:
    _add(ctx, f"{phase} begins")


def ds_phase_end(ctx: Context, phase: str, metrics: Mapping[str, float]) -> None:
    _add(ctx, f"evaluated: {sorted(metrics)}" if phase == "eval" else f"{phase} ends")


def ds_checkpoint_saved(ctx: Context, tag: str) -> None:
    _add(ctx, f"saved {tag}")


def ds_close(ctx: Context, error: BaseException | None) -> None:
    if error is not None:
        print(
            f"rank {ctx.rank}: {', '.join(ctx.stash[EVENTS])}, {type(error).__name__}",
            file=sys.stderr,
        )


def last_events(engine: Any) -> list[str]:
    """Oldest first."""
    return list(engine.ctx.stash[EVENTS])


def ds_engine_methods() -> Mapping[str, str]:
    """``engine.last_events()``."""
    return {"last_events": f"{__name__}:last_events"}
