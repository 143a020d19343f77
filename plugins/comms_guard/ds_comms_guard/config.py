"""The section ``comms_guard`` (torch-free)."""

from __future__ import annotations

from ds_core.config import Section, option

__all__ = ["CommsGuard"]


class CommsGuard(Section):
    """The guard against ranks that disagree on the next collective."""

    enabled: bool = option(False, "End the job with a message when ranks provably wait for different collectives.")
    patience: float = option(
        10.0, "Seconds that a rank waits for a collective before it asks where the others are.", gt=0
    )
