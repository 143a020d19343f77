"""What dscore-verify offers: the command ``dscore verify``, and the recorder of a run (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pluggy

from ds_core.context import StashKey
from ds_core.entries import CommandEntry

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.context import Context
    from ds_core.gradients import Gradients
    from ds_verify.recording.recorder import Recorder

RECORDER: StashKey[Recorder] = StashKey("the recorder")


def ds_config() -> type[BaseModel]:
    """The section ``verify``."""
    from ds_verify.config import Verify

    return Verify


def ds_commands() -> Mapping[str, CommandEntry]:
    """``dscore verify``."""
    text = "Say whether a script computes in its layout what one process computes."
    return {"verify": CommandEntry("ds_verify.command:app", text)}


def ds_open(ctx: Context) -> None:
    """The recorder of this run; of a reference, what will replay the record."""
    from ds_verify.recording.making import make_recorder

    if (recorder := make_recorder(ctx)) is not None:
        ctx.stash[RECORDER] = recorder


@pluggy.HookimplMarker("ds_core")(trylast=True)  # after all who change them
def ds_gradients(ctx: Context, gradients: Gradients) -> None:
    """The reduced gradients and their norm are recorded."""
    if (recorder := ctx.stash.get(RECORDER)) is not None:
        recorder.add_gradients(gradients)


def ds_step_end(ctx: Context, step: int, metrics: Mapping[str, float]) -> None:
    """The new weights are recorded, and what was recorded in this step is written."""
    if (recorder := ctx.stash.get(RECORDER)) is not None:
        recorder.end_step(metrics)
