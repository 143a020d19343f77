"""An interceptor that logs slow collectives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from ds_core import comm

log = logging.getLogger("old_interceptor")


class OldInterceptor(comm.Interceptor):
    """Called around every collective of the process."""

    order = comm.Order.OBSERVE  # outside of those that check

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def around(self, collective: comm.Collective, call: Callable[[], Any]) -> Any:
        """Make the collective by ``call()``, once, and return what it returns."""
        begin = time.perf_counter()
        result = call()
        taken = time.perf_counter() - begin
        if taken > self.seconds:
            log.warning("%s %s took %.3f s", collective.op, collective.label, taken)
        return result
