"""When this rank waits, and for what, seen from a thread beside it."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from types import FrameType
from typing import Any

from ds_comms_guard.counts import Counts, find_wait
from ds_comms_guard.ledger import Ledger
from ds_core import comm


@dataclass(frozen=True, slots=True)
class Wait:
    """What is waited for, in words, and since when it was seen.

    call: (group name, number), where one collective or message of `ds_core.comm` is waited for.
    queued: it is for some of what was called, by the host or by its device. Neither: for a function
    of torch.distributed.
    """

    since: float
    text: str
    call: tuple[str, int] | None = None
    queued: bool = False


class Waits:
    """Looks for waits.

    still_after: seconds without a call until this rank stands still.
    packages: see `find_wait`.
    """

    def __init__(
        self, calls: Ledger | Counts, still_after: float, packages: Collection[str]
    ) -> None:
        self._calls = calls
        self._still_after = still_after
        self._packages = packages
        self._issued = -1
        self._moved = 0.0
        # behind all that was queued when this rank had moved last
        self._events: list[Any] | None = None
        self._frame: tuple[FrameType | None, float] = (None, 0.0)

    def still(self) -> bool:
        """Whether this rank has made no call for a while, as of the last `look`."""
        return time.monotonic() - self._moved >= self._still_after

    def look(self) -> Wait | None:
        """The longest wait, as far as it was seen; called every few seconds, by one thread."""
        now = time.monotonic()
        issued = self._calls.issued
        held, self._frame = self._frame, (None, now)
        if issued != self._issued:
            self._issued = issued
            self._moved = now
            self._events = None
            held = (None, now)
        if (known := self._calls.longest()) is not None:
            return Wait(known[1], known[0].describe(), known[0].place)
        if self._moved == now:
            return None
        return self._in_frames(now, held) or (self._on_device() if self.still() else None)

    def _in_frames(self, now: float, held: tuple[FrameType | None, float]) -> Wait | None:
        """A frame is held until the next look, so that another call is another frame."""
        seen = find_wait(self._packages)
        if seen is None:
            return None
        since = self._moved if seen.exact else held[1] if seen.frame is held[0] else now
        self._frame = (None if seen.exact else seen.frame, since)
        return Wait(since, seen.text, seen.wait, seen.queued)

    def _on_device(self) -> Wait | None:
        """By events behind all that was queued: they end when the collectives have ended."""
        device = self._calls.device
        if device is None or not self._issued:
            return None
        if self._events is None:
            self._events = []
            device.set_device(device.local_index(comm.local_rank()))  # of this thread
            for stream in self._calls.take_streams():
                with device.stream(stream):
                    self._events.append(device.new_event())
                    self._events[-1].record()
        self._events = [event for event in self._events if not event.query()]
        return (
            Wait(self._moved, "what was queued on its device", queued=True)
            if self._events
            else None
        )
