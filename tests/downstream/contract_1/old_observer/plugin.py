"""The declaration of old-observer: stop when the loss has not fallen for some steps (torch-free)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pydantic import Field

from ds_core.config import Section
from ds_core.context import StashKey
from ds_core.entries import Request

if TYPE_CHECKING:
    from ds_core.context import Context


class Settings(Section):
    """The section ``old_observer``."""

    patience: int = Field(10, ge=1, description="Steps without a lower loss after which to stop.")
    folder: str | None = Field(None, description="Folder for a checkpoint at the end; none, no checkpoint.")


@dataclass
class Best:
    """The lowest loss so far, and the steps since then."""

    loss: float = math.inf
    steps: int = 0

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON has no infinity."""
        return asdict(self) if self.loss < math.inf else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.loss, self.steps = state.get("loss", math.inf), state.get("steps", 0)


BEST: StashKey[Best] = StashKey("the lowest loss of old-observer")


def best(ctx: Context) -> Best:
    """This run's."""
    if BEST not in ctx.stash:
        ctx.stash[BEST] = Best()
    return ctx.stash[BEST]


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_request(ctx: Context, metrics: Mapping[str, float]) -> Request | None:
    """It is enough that one rank asks; all ranks then stop after this step."""
    settings, seen = ctx.config.section("old_observer"), best(ctx)
    assert isinstance(settings, Settings)
    if "loss" not in metrics:
        return None
    lower = metrics["loss"] < seen.loss
    seen.loss, seen.steps = (metrics["loss"], 0) if lower else (seen.loss, seen.steps + 1)
    return Request(stop=True, save=settings.folder) if seen.steps >= settings.patience else None


def ds_checkpointables(ctx: Context) -> Mapping[str, Best]:
    """What a resumed run has to remember."""
    return {"best": best(ctx)}
