"""Hears SIGTERM, with which schedulers, clouds and the launcher tell a process that it will be
ended soon.
"""

from __future__ import annotations

import logging
import os
import signal
from types import FrameType
from typing import Any

from torch.utils.data import get_worker_info

log = logging.getLogger("ds_core.autosave")


class Notice:
    """heard: whether SIGTERM has come since this was made. Use it in the main thread."""

    def __init__(self) -> None:
        self.heard = False
        self._pid = os.getpid()
        self._before: Any = signal.signal(signal.SIGTERM, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a child that was forked later has this handler too
            if (
                get_worker_info() is None
            ):  # loaders' workers get the signal of their group, and are needed until the end
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.heard = True
        if callable(self._before):  # the program's own
            self._before(number, frame)

    def close(self) -> None:
        """Give the signal back to who had it, unless somebody has taken it since."""
        if signal.getsignal(signal.SIGTERM) == self._hear:
            signal.signal(
                signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL
            )


def listen() -> Notice | None:
    """A `Notice`; None, with a warning, where Python does not allow it."""
    try:
        return Notice()
    except ValueError:
        log.warning(
            "autosave.on_sigterm has no effect: training does not run in the program's main thread"
        )
        return None
