"""The section ``numerics`` (torch-free)."""

from __future__ import annotations

from typing import Literal

from ds_core.config import Section, option


class Numerics(Section):
    """Some steps are computed again, to find bits that have flipped."""

    every: int = option(
        100,
        "Optimizer steps from one that is computed again to the next; the first step of a run is "
        "one of them.",
        ge=1,
    )
    action: Literal["raise", "warn", "repair"] = option(
        "raise",
        "What follows a difference: end training on all ranks; warn, and continue with the results "
        "of the first pass; or continue with what two of three passes agree on, and end training "
        "where that is not possible.",
    )
