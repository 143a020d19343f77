"""Who waits at the start says so on the log (torch-free)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("ds_core.comm")

TOLD_AFTER = 60.0
"""Seconds of a wait until it is told; again when it has lasted twice as long as last time."""


class Waiting:
    """A wait that begins now.

    number: whose; 0 and 1 tell of it first, since one is enough for all to read.
    """

    def __init__(self, number: int) -> None:
        self._start = time.monotonic()
        self._next = TOLD_AFTER * (1 if number < 2 else 3)

    def tell(self, text: Callable[[], str]) -> None:
        """Log `text` ("rank 0 waits for ...") if the wait has lasted for so long; called again and
        again.
        """
        waited = time.monotonic() - self._start
        if waited >= self._next:
            self._next = 2 * waited
            log.warning("%s, since %.0f s", text(), waited)
