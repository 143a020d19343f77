"""The section ``verify``, which ``dscore verify`` adds to the config of each run (torch-free)."""

from __future__ import annotations

from typing import Literal

from ds_core.config import Section, option


class Verify(Section):
    """A run that is recorded, or replays a record; ``dscore verify`` writes this section."""

    writes_outside = ("folder",)

    role: Literal["record", "replay", "compare"] = option(
        "record",
        'Record the run, or ("replay") compute again what `source` has recorded; "compare": do '
        "neither until `ds_verify.compare` gets the engine.",
    )
    folder: str = option("verify", "The folder for what this run records.", min_length=1)
    source: str = option("", "The folder with the record to replay.")
    steps: int = option(3, "Optimizer steps that are recorded; then the program ends.", ge=1)
    seed: int = option(0, "Seed of the random numbers of each micro-batch's forward.", ge=0)
    perturb: bool = option(
        False, "Change the initial weights, and floating inputs, by one unit in the last place."
    )
    limit: int = option(
        65536, "Tensors with more elements than this are compared in a sample of this size.", ge=1
    )
