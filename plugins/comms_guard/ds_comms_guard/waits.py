"""What this rank waits for, seen from a thread beside it: nothing of it costs a collective anything."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist

from ds_comms_guard.ledger import Call, Ledger
from ds_comms_guard.whereabouts import main_stack

__all__ = ["Wait", "Waits"]

_TORCH = os.path.join(os.path.dirname(os.path.abspath(dist.__file__)), "distributed_c10d.py")


@dataclass(frozen=True, slots=True)
class Wait:
    """What is waited for, and since when it was seen.

    call: a collective or message of `ds_core.comm` in which the host waits. device: the host has gone on, and the
    device does not end what was queued up to the last collective. Neither: `text`, a function of torch.distributed.
    """

    since: float
    text: str
    call: Call | None = None
    device: bool = False

    def same(self, other: Wait | None) -> bool:
        """Whether `other` is an earlier look at the same wait."""
        return other is not None and (self.since, self.call, self.text) == (other.since, other.call, other.text)


class Waits:
    """Looks for waits. still_after: seconds without a call until the device and torch.distributed are looked at."""

    def __init__(self, ledger: Ledger, still_after: float) -> None:
        self._ledger, self._still_after = ledger, still_after
        self._issued, self._moved = -1, 0.0
        self._events: list[Any] = []
        self._marked = 0.0
        self._frame: tuple[FrameType | None, float] = (None, 0.0)

    def still(self) -> bool:
        """Whether this rank has made no call for a while, as of the last `look`."""
        return time.monotonic() - self._moved >= self._still_after

    def look(self) -> Wait | None:
        """The longest wait, as far as it was seen; called every few seconds, by one thread."""
        now, issued = time.monotonic(), self._ledger.issued
        if issued != self._issued:
            self._issued, self._moved, self._events = issued, now, []
        found = self._ledger.longest()
        if found is None and self.still():
            return self._on_device(now) or self._in_torch(now)
        self._frame = (None, now)
        return Wait(found[1], found[0].describe(), found[0]) if found is not None else None

    def _on_device(self, now: float) -> Wait | None:
        """Events behind all that was queued: they end when the collectives have ended."""
        device = self._ledger.device
        if device is None:
            return None
        if streams := self._ledger.take_streams():
            device.set_device(self._ledger.index)  # of this thread
            self._marked = self._moved
        for stream in streams:
            with device.stream(stream):
                self._events.append(device.new_event())
                self._events[-1].record()
        self._events = [event for event in self._events if not event.query()]
        return Wait(self._marked, "what was queued on its device", device=True) if self._events else None

    def _in_torch(self, now: float) -> Wait | None:
        """Somebody else's call of torch.distributed. The frame is held, so that another call is another frame."""
        frame = next((f for f in reversed(list(main_stack())) if f.f_code.co_filename == _TORCH), None)
        if frame is None or frame is not self._frame[0]:
            self._frame = (frame, now)
        return None if frame is None else Wait(self._frame[1], f"torch.distributed.{frame.f_code.co_name}")
