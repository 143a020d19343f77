"""The section ``comms_guard`` (torch-free)."""

from __future__ import annotations

from ds_core.config import Section, option


class CommsGuard(Section):
    """The guard against ranks that disagree on the next collective; waits are reported without
    it too.
    """

    enabled: bool = option(
        False, "End the job with a message when ranks provably wait for different collectives."
    )
    patience: float | None = option(
        None,
        "Seconds that a rank waits for a collective before the log says who has not come, and "
        "again at growing "
        "intervals; null: 10 if enabled, else 60.",
        gt=0,
    )

    @property
    def seconds(self) -> float:
        """`patience`, or what stands for null."""
        return self.patience if self.patience is not None else 10.0 if self.enabled else 60.0
