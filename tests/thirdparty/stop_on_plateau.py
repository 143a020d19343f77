"""A plugin of somebody else: save a checkpoint and stop when the loss has not fallen for some
steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import Field

from ds_core.config import Section
from ds_core.context import StashKey
from ds_core.entries import Request

if TYPE_CHECKING:
    from ds_core.context import Context


class PlateauConfig(Section):
    """The section ``stop_on_plateau``."""

    patience: int = Field(3, ge=1, description="Steps without a lower loss after which to stop.")
    folder: str | None = Field(
        None, description="Folder for a checkpoint at the end; none, no checkpoint."
    )


@dataclass
class Best:
    """The lowest loss so far, and the step that had it."""

    loss: float
    step: int


BEST = StashKey[Best]("the lowest loss so far")


def ds_config() -> type[PlateauConfig]:
    """The model of section ``stop_on_plateau``."""
    return PlateauConfig


def ds_request(ctx: Context, step: int, metrics: Mapping[str, float]) -> Request | None:
    """Ask to stop once the loss of this rank has not fallen for `patience` steps; all ranks stop
    then.
    """
    section = ctx.config.section("stop_on_plateau")
    assert isinstance(section, PlateauConfig)
    if "loss" not in metrics:  # after a plain loss.backward()
        return None
    if BEST not in ctx.stash:
        ctx.stash[BEST] = Best(metrics["loss"], step)
    best = ctx.stash[BEST]
    if metrics["loss"] < best.loss:
        best.loss = metrics["loss"]
        best.step = step
    return Request(stop=True, save=section.folder) if step - best.step >= section.patience else None
