"""The section ``trackio`` (torch-free)."""

from __future__ import annotations

from typing import Literal

from ds_core.config import Section, option


class TrackioConfig(Section):
    """Recording with trackio: in a local database (TRACKIO_DIR says where), or on a Hugging Face
    Space.
    """

    writes_outside = ("enabled",)

    enabled: bool = option(False, "Record the run with trackio.")
    project: str = option("deepspeed", "Project of the run.", min_length=1)
    name: str | None = option(None, "Name of the run; null: trackio makes one up.")
    group: str | None = option(None, "Group of runs that this one belongs to.")
    resume: Literal["never", "allow", "must"] = option(
        "never", "Whether to continue the run of that name."
    )
    space_id: str | None = option(
        None, "Space that the run is sent to as well; null: it stays on this machine."
    )
