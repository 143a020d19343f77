"""Messages between ranks on one host, through the rings of their segment.

[Note: no rank need wait] A message goes into the ring when it is sent, and out of it when it is
waited for, both in the caller's thread. Two cases need a thread, which lives as long as they last.
A full ring: the rest of what was sent follows as room appears. Receives of more bytes than a ring
holds: the sender may wait for that before it does what this rank waits for, so they are taken
before they are waited for. What is posted beyond that fits in the ring.

A message belongs to the receive from its sender that was posted first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor

from ds_core.errors import CommError, LostRankError

LEFT = 5  # as in cpp/shared/memory.h
HEADER = 8
"""Bytes that go before each message."""
_LOOK = 0.05  # seconds of waiting after which to ask whether the other one is there
_MEND = "both must name tensors of the same size"


class SentWork:
    """The work of a message that is in its ring."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """It is."""
        return True

    def is_completed(self) -> bool:
        """It is."""
        return True


SENT = SentWork()


class Sending:
    """The work of a message that was longer than the room in its ring.

    gone: bytes of it that are in the ring or beyond; -1: not even its length is.
    """

    def __init__(self, post: Post, flat: Tensor, to: int, gone: int) -> None:
        self.post = post
        self.flat = flat
        self.to = to
        self.gone = gone
        self.done = threading.Event()
        self.error = ""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until it is there.

        LostRankError when the receiver has ended, or has taken nothing for too long.
        """
        seconds = self.post.timeout if timeout is None else timeout.total_seconds()
        until = time.monotonic() + seconds
        while not self.done.wait(max(0.0, min(0.1, until - time.monotonic()))):
            if time.monotonic() >= until:
                raise self.post.late(
                    f"message of {self.flat.nbytes} bytes to rank {self.post.names[self.to]}",
                    seconds,
                )
        if self.error:
            raise LostRankError(self.error)
        return True

    def is_completed(self) -> bool:
        """Whether it is there, or will never be; wait tells which."""
        return self.done.is_set()


class Receiving:
    """The work of a receive.

    source: its sender.
    """

    def __init__(self, post: Post, flat: Tensor, source: int) -> None:
        self.post = post
        self.flat = flat
        self.source = source
        # Bytes that have come.
        self.got = 0
        self.done = False
        self.error = ""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the message is in its tensor.

        LostRankError when that cannot be or takes too long; CommError when the message has another
        length.
        """
        self.post.receive(self, self.post.timeout if timeout is None else timeout.total_seconds())
        return True

    def is_completed(self) -> bool:
        """Whether the message is in its tensor, or will never be; wait tells which.

        Takes what has come.
        """
        return self.post.look(self)


class Post:
    """A rank's rings in `segment`.

    names: of the ranks, for messages.
    pids: of the ranks' processes, likewise.
    ring: bytes of one ring.
    timeout: of waits, in seconds.
    """

    def __init__(
        self,
        segment: Any,
        rank: int,
        names: Sequence[int],
        pids: Sequence[int],
        ring: int,
        timeout: float,
    ) -> None:
        self._segment = segment
        self._rank = rank
        self.names = names
        self._pids = pids
        self._ring = ring
        self.timeout = timeout
        others = [r for r in range(len(names)) if r != rank]
        # The backlog is touched by senders and by the thread that empties it; likewise the receives
        # below.
        self._out_lock = threading.Lock()
        self._in_lock = threading.Lock()
        self._backlog: dict[int, deque[Sending]] = {r: deque() for r in others}
        # Receives in the order of their calls, of all senders.
        self._posted: list[Receiving] = []
        # Sender -> the receive whose message has begun to arrive.
        self._arriving: dict[int, Receiving] = {}
        self._due = dict.fromkeys(others, 0)  # bytes that are posted and have not come
        self._drained: set[int] = set()  # senders that a thread receives from
        # Senders whose stream can no longer be read, and why: a length did not match.
        self._broken: dict[int, str] = {}

    # -- sending -----------------------------------------------------------------------------------

    def isend(self, flat: Tensor, to: int) -> Sending | SentWork:
        """Send a flat contiguous tensor to rank `to` of the group; it must stay as it is until the
        work is done.
        """
        backlog = self._backlog[to]
        with self._out_lock:
            gone = -1
            # Behind a backlog a message must wait for its turn: the ring is one stream.
            if not backlog:
                gone = self._segment.put(to, flat.data_ptr(), flat.nbytes, True)
                if gone == flat.nbytes:
                    return SENT
            work = Sending(self, flat, to, gone)
            backlog.append(work)
            if len(backlog) == 1:
                threading.Thread(
                    target=self._push, args=(to,), name="ds_ops_cpu push", daemon=True
                ).start()
        return work

    def _push(self, to: int) -> None:
        """Send the backlog as the receiver makes room.

        This thread alone writes into the ring meanwhile.
        """
        segment = self._segment
        backlog = self._backlog[to]
        while True:
            work = backlog[0]
            left = work.flat.nbytes - max(0, work.gone)
            # Only the first piece has the length before it.
            put = segment.put(to, work.flat.data_ptr() + max(0, work.gone), left, work.gone < 0)
            if put >= 0:
                work.gone = max(0, work.gone) + put
            if work.gone == work.flat.nbytes:
                with self._out_lock:
                    backlog.popleft()
                    work.done.set()
                    if not backlog:
                        return
            # No room, and the receiver makes none: perhaps it is gone.
            elif put <= 0 and (error := self._lost(to)) is not None:
                with self._out_lock:
                    # All that waits for this receiver fails with it.
                    for work in backlog:
                        work.error = (
                            f"rank {self.names[self._rank]}: message of "
                            f"{work.flat.nbytes} bytes "
                            f"{error}"
                        )
                        work.done.set()
                    backlog.clear()
                return
            else:
                segment.await_room(to, min(left + HEADER, self._ring // 4))

    # -- receiving ---------------------------------------------------------------------------------

    def irecv(self, flat: Tensor, source: int) -> Receiving:
        """Receive into a flat contiguous tensor from rank `source` of the group."""
        work = Receiving(self, flat, source)
        with self._in_lock:
            self._posted.append(work)
            self._due[source] += flat.nbytes + HEADER
            if self._due[source] > self._ring and source not in self._drained:
                self._drained.add(source)
                threading.Thread(
                    target=self._drain, args=(source,), name="ds_ops_cpu drain", daemon=True
                ).start()
        return work

    def _drain(self, source: int) -> None:
        """Receive until what is still posted fits in the ring."""
        while True:
            with self._in_lock:
                # A message that has begun to arrive must be completed before the next can be read.
                work = self._arriving.get(source) or self._first(source)
                if work is None or self._due[source] <= self._ring:
                    self._drained.discard(source)
                    return
            try:
                self.receive(work, None)
            except CommError:
                continue  # it is no longer posted; its own wait raises

    def look(self, work: Receiving) -> bool:
        """Take what has come; whether `work` has ended."""
        with self._in_lock:
            self._advance(work)
            if not work.done:
                self._give_up(work)
            return work.done

    def receive(self, work: Receiving, seconds: float | None) -> None:
        """Block until `work` has ended well; raises otherwise."""
        begin = time.monotonic()
        waited = 0.0
        while True:
            with self._in_lock:
                if not work.done:
                    self._advance(work)
                if work.done:
                    break
                # Read under the lock, so that no byte can arrive unseen between here and the wait.
                taken = self._segment.taken(work.source)
            self._segment.await_bytes(work.source, taken)
            waited = time.monotonic() - begin
            # Looking whether the sender lives is a system call: not in the usual short wait.
            if waited > _LOOK:
                self.look(work)
            if not work.done and seconds is not None and waited > seconds:
                raise self.late(self._what(work), seconds)
        if work.error:
            raise (CommError if work.error.endswith(_MEND) else LostRankError)(work.error)

    def _advance(self, work: Receiving) -> None:
        while not work.done and self._take(work.source):
            pass

    def _take(self, source: int) -> bool:
        """Take what has come of one message from `source`; whether that was all of it."""
        work = self._arriving.get(source)
        if work is None:
            work = self._first(source)
            if work is None or source in self._broken:
                return False
            length = self._segment.next(source)
            if length < 0:
                return False
            # Nothing more can be read from this sender: the next bytes are not a length.
            if length != work.flat.nbytes:
                self._broken[source] = (
                    f"rank {self.names[self._rank]} receives {work.flat.nbytes} bytes from rank "
                    f"{self.names[source]}, "
                    f"which sent {length}; {_MEND}"
                )
                self._end(work, self._broken[source])
                return False
            self._arriving[source] = work
        left = work.flat.nbytes - work.got
        work.got += self._segment.get(source, work.flat.data_ptr() + work.got, left)
        if work.got < work.flat.nbytes:
            return False
        self._end(work, "")
        return True

    def _first(self, source: int) -> Receiving | None:
        """The receive from `source` that was posted first."""
        return next((w for w in self._posted if w.source == source), None)

    def _end(self, work: Receiving, error: str) -> None:
        self._posted.remove(work)
        if self._arriving.get(work.source) is work:
            del self._arriving[work.source]
        # A failed message counts too, or `_drain` would never finish.
        self._due[work.source] -= work.flat.nbytes + HEADER
        work.done = True
        work.error = error

    def _give_up(self, work: Receiving) -> None:
        """End `work` if nothing can come any more: its sender is lost."""
        error = self._broken.get(work.source) or self._lost(work.source)
        if error is None:
            return
        self._advance(work)  # it may have been sent before its sender ended
        if not work.done:
            self._end(work, error if error.endswith(_MEND) else f"{self._what(work)} {error}")

    # -- errors ------------------------------------------------------------------------------------

    def _what(self, work: Receiving) -> str:
        receiver = self.names[self._rank]
        sender = self.names[work.source]
        return f"rank {receiver}: receiving {work.flat.nbytes} bytes from rank {sender}"

    def _lost(self, rank: int) -> str | None:
        code = self._segment.lost(rank)
        if code == 0:
            return None
        if code == LEFT:
            return f"failed, for rank {self.names[rank]} has destroyed the process group"
        return f"failed, for rank {self.names[rank]} (process {self._pids[rank]}) has ended"

    def late(self, what: str, seconds: float) -> LostRankError:
        """For a wait of `seconds`."""
        return LostRankError(f"{what} did not end within {seconds:g} s")
