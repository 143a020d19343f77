"""A plugin for `CheckpointerConformance`: it keeps a state of each rank's own, and can fail to give
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_core.config import Section
from ds_core.context import StashKey


class Settings(Section):
    """It has no keys."""


class Kept:
    """value: the state. fails: `state_dict` raises."""

    def __init__(self, value: int) -> None:
        self.value = value
        self.fails = False

    def state_dict(self) -> dict[str, Any]:
        """The value; RuntimeError where it is to fail."""
        if self.fails:
            raise RuntimeError("this state cannot be had")
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a value."""
        self.value = state["value"]


_KEPT: StashKey[Kept] = StashKey("state kept for the kit")


def of(ctx: Any) -> Kept:
    """The state of a run."""
    kept: Kept | None = ctx.stash.get(_KEPT)
    if kept is None:
        kept = ctx.stash[_KEPT] = Kept(0)
    return kept


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_checkpointables(ctx: Any) -> dict[str, Any]:
    """The state."""
    return {"value": of(ctx)}


def ds_step_end(ctx: Any, step: int) -> None:
    """Another value on each rank and at each step."""
    of(ctx).value = 100 * ctx.rank + step
