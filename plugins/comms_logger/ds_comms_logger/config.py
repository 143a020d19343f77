"""The section ``comms_logger`` (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ds_core.config import Section, option


class CommsLogger(Section):
    """The log of collectives."""

    enabled: bool = option(
        False, "Count, size and time collectives; each logged call is synchronised."
    )
    verbose: bool = option(False, "Log every call as it happens.", per_rank=True)
    debug: bool = option(False, "Add the caller's name to each call.")
    prof_all: bool = option(True, "Log every collective.")
    prof_ops: list[str] = option([], "With prof_all false: the collectives to log, by name.")

    def remarks(self, given: Any) -> Iterable[tuple[str, str]]:
        """A choice of collectives next to prof_all."""
        if self.enabled and self.prof_all and self.prof_ops:
            yield "prof_ops", "has no effect: prof_all is true"
