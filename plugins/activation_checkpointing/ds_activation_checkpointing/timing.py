"""Times of blocks, and waiting for the device around them (``profile``,
``synchronize_checkpoint_boundary``).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_core.accelerator import Accelerator

log = logging.getLogger("ds_activation_checkpointing")


class Watch:
    """What happens where a block begins and ends.

    logs: whether its time goes to the log.
    synchronize: wait there.
    """

    def __init__(self, accelerator: Accelerator, *, logs: bool, synchronize: bool) -> None:
        self._accelerator = accelerator
        self._logs = logs
        self._synchronize = synchronize
        self._begun: list[Any] = []

    def begin(self) -> None:
        """A forward or a recomputation begins."""
        if self._synchronize:
            self._accelerator.synchronize()
        if self._logs:
            self._begun.append(self._event())

    def end(self, name: str, what: str) -> None:
        """It has ended."""
        if self._synchronize:
            self._accelerator.synchronize()
        if self._logs:
            begun = self._begun.pop()
            ended = self._event()
            ended.synchronize()
            log.info("%s: %s %.3f ms", name, what, begun.elapsed_time(ended))

    def _event(self) -> Any:
        event = self._accelerator.new_event(timing=True)
        event.record()
        return event
