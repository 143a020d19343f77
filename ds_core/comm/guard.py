"""Ranks that do not make the same collectives in the same order are told so, instead of waiting for the time-out.

[Note: how it is known] Every collective of a group gets a number and is folded into the group's digest: operation,
size, dtype, and what the caller said of it (`label`). Over gloo the digest is part of the messages' tags, so
collectives that do not belong together never exchange data. Whoever waits longer than `patience` seconds publishes
its position (number, digests, place in the program) in the job's store; one of those who wait compares. Only proof ends
the job: two ranks made different collectives under one number, or some wait for each other or for a rank that has
ended. A rank that is only slow proves nothing, and the others wait for it; it is asked where it is, which is logged.

The fast path costs a dict look-up and a small object per collective; the store is asked nothing until somebody waits.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

from ds_core.comm.interceptor import (
    TAG_BITS,
    Collective,
    Interceptor,
    Order,
    activities,
    add_interceptor,
    remove_interceptor,
)
from ds_core.comm.verdict import SHOWN, Line, Position, judge
from ds_core.errors import CommError, ConfigError, LostRankError

__all__ = ["EXIT_CODE", "Guard", "configure", "reset"]

log = logging.getLogger("ds_core.comm")

EXIT_CODE = 86
"""Of a process that the guard ended."""

KEPT = 64
"""Collectives per group that are remembered for comparison; tags stop ranks within a few of a difference."""

HEAR_ALL = 5.0
"""Seconds, at most, that a proof waits for more ranks to say where they are."""

LOOK_FOR_OTHERS = 5.0
"""Seconds between questions of a rank that does not wait: have the others given up, or do they ask where it is?"""

_UNEVEN = ("all_gather", "all_to_all_single", "gather", "scatter", "barrier")  # sizes may differ between ranks
_BY_OUTPUT = ("all_gather_into_tensor", "reduce_scatter_tensor")
_MESSAGES = ("send", "recv", "isend", "irecv")

active: Guard | None = None
"""The guard that is on, or None."""


class _Call:
    """One collective: its place in its group's order, and what it is. key: operation, label, elements, dtype."""

    __slots__ = ("digest", "key", "line", "number")

    def __init__(self, line: _Line, number: int, key: tuple[str, str, int, Any], digest: int) -> None:
        self.line, self.number, self.key, self.digest = line, number, key, digest

    def describe(self) -> str:
        """``weights of 'h.0.weight' (all_gather_into_tensor of 4096 float32)``."""
        op, text, numel, dtype = self.key
        what = f"{op} of {numel} {str(dtype).removeprefix('torch.')}" if numel >= 0 else op
        return f"{text} ({what})" if text else what


class _Line:
    """What this rank has called on one group. members: its global ranks; name: the group's, equal on all ranks."""

    __slots__ = ("calls", "count", "digest", "members", "name")

    def __init__(self, name: str, members: Sequence[int]) -> None:
        self.name, self.members = name, list(members)
        self.count = 0
        self.digest = 1
        self.calls: deque[_Call] = deque(maxlen=KEPT)


class GuardedWork:
    """A collective under way, of which the guard knows whether somebody waits for it."""

    __slots__ = ("_call", "_guard", "_work")

    def __init__(self, work: Any, call: _Call, guard: Guard) -> None:
        self._work, self._call, self._guard = work, call, guard

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in its tensor. Raises CommError when the backend fails, saying who has ended."""
        guard = self._guard
        me = threading.get_ident()
        guard.waiting[me] = self._call
        try:
            self._work.wait() if timeout is None else self._work.wait(timeout)
        except RuntimeError as error:
            raise guard.failed(self._call, error) from error
        finally:
            guard.waiting.pop(me, None)
        return True

    def is_completed(self) -> bool:
        """Whether the result is in its tensor."""
        return bool(self._work.is_completed())


class Guard(Interceptor):
    """Numbers this process's collectives, and watches for waits without end.

    patience: seconds. store: the job's, used by this guard alone. packages: top-level names of what is not the user's.
    """

    order = Order.CHECK

    def __init__(self, patience: float, store: Any, rank: int, size: int, packages: Collection[str] = ()) -> None:
        self.patience, self.rank, self.size = patience, rank, size
        self.waiting: dict[int, _Call] = {}
        self._store, self._packages = store, frozenset(packages)
        self._lines: WeakKeyDictionary[Any, _Line] = WeakKeyDictionary()
        self._marks: dict[tuple[str, str, int, Any], int] = {}
        self._seen: dict[_Call, float] = {}
        self._beat = 0
        self._key = ""  # under which our position is published
        self._suspected: dict[int, tuple[int, int]] = {}
        self._proven = math.inf  # since when this rank, as judge, has had a proof
        self._warned: _Call | None = None
        self._asking: tuple[str, float] = ("", 0.0)  # what this rank, as judge, asks the others about, and since when
        self._answered = ""
        self._stop = threading.Event()
        self._tick = min(1.0, patience / 4)
        self._thread = threading.Thread(target=self._watch, name="ds_core.comm guard", daemon=True)
        self._thread.start()

    # -- the fast path ---------------------------------------------------------------------------------------

    def around(self, collective: Collective, call: Callable[[], Any]) -> Any:
        """Number a collective, watch who waits for it, and explain its failure."""
        op = collective.op
        if op in _MESSAGES:
            return call()
        line = self._lines.get(collective.group) or self._line(collective.group)
        numel, dtype = -1, None
        if op not in _UNEVEN:
            message = collective.argument("output" if op in _BY_OUTPUT else "tensor")
            numel, dtype = message.numel(), message.dtype
        key = (op, collective.label, numel, dtype)
        mark = self._marks.get(key)
        if mark is None:  # crc: Python's own hash of a string differs between processes
            mark = self._marks[key] = zlib.crc32(repr(key).encode())
        line.count += 1
        line.digest = (line.digest * 1000003 + mark) & 0xFFFFFFFF
        made = _Call(line, line.count, key, line.digest)
        line.calls.append(made)
        collective.tag = line.digest >> (32 - TAG_BITS)
        me = threading.get_ident()
        self.waiting[me] = made
        try:
            work = call()
        except RuntimeError as error:
            raise self.failed(made, error) from error
        finally:
            self.waiting.pop(me, None)
        return None if work is None else GuardedWork(work, made, self)

    def _line(self, group: Any) -> _Line:
        import torch.distributed as dist

        self._lines[group] = line = _Line(group.group_name, dist.get_process_group_ranks(group))
        return line

    # -- when something failed -------------------------------------------------------------------------------

    def failed(self, call: _Call, error: Exception) -> Exception:
        """The error to raise for a collective that the backend gave up: the verdict, or who has ended."""
        if isinstance(error, CommError) and not isinstance(error, LostRankError):
            return error
        text = f"rank {self.rank}: {call.describe()} failed"
        until = time.monotonic() + 2.0
        try:
            while time.monotonic() < until:
                if (verdict := self._verdict()) is not None:
                    return CommError(verdict)
                if ended := [p for p in self._positions() if p.ended]:
                    who = "; ".join(f"rank {p.rank} has ended ({p.ended})" for p in ended)
                    return CommError(f"{text}, for {who}. {_first_line(error)}")
                time.sleep(0.1)
        except RuntimeError:
            if self.rank != 0:
                text += ", and rank 0, which keeps the job's store, does not answer: it has probably ended"
        return CommError(f"{text}. {_first_line(error)}")

    # -- the watching thread ---------------------------------------------------------------------------------

    def _watch(self) -> None:
        asked = time.monotonic()
        while not self._stop.wait(self._tick):
            try:
                call = self._stuck()
                if call is not None:
                    self._publish(call)
                elif self._key:
                    self._withdraw()
                if call is None and time.monotonic() - asked < LOOK_FOR_OTHERS:
                    continue
                asked = time.monotonic()
                if call is None:
                    self._answer()
                verdict = self._verdict() or (self._judge(call) if call is not None else None)
            except RuntimeError:  # the store has gone with rank 0; gloo tells those that wait
                continue
            if verdict is not None:
                self._end(verdict)

    def _stuck(self) -> _Call | None:
        """The collective that somebody has waited for longest, if that is longer than `patience`."""
        now = time.monotonic()
        self._seen = {call: self._seen.get(call, now) for call in list(self.waiting.values())}
        first = min(self._seen, key=lambda c: self._seen[c], default=None)
        return first if first is not None and now - self._seen[first] >= self.patience else None

    def _position(self, call: _Call | None, ended: str = "") -> Position:
        lines = {
            line.name: Line(
                tuple(line.members),
                line.count,
                tuple((c.number, c.digest, c.describe()) for c in list(line.calls)),
            )
            for line in list(self._lines.values())
            if len(line.members) > 1
        }
        self._beat += 1
        wait = (call.line.name, call.number) if call is not None else None
        return Position(self.rank, self._beat, lines, wait, "" if ended else self._where(), activities(), ended)

    def _where(self) -> str:
        """The user's line that the program is at."""
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        for frame, line in traceback.walk_stack(main):
            if _users(frame) and str(frame.f_globals.get("__name__")).split(".")[0] not in self._packages:
                return f"{os.path.basename(frame.f_code.co_filename)}:{line}"
        return ""

    def _publish(self, call: _Call) -> None:
        if not self._key:
            self._key = self._new_key()
        self._store.set(self._key, json.dumps(self._position(call).as_json()))
        if self._warned is not call:
            self._warned = call
            log.warning(
                "rank %d has waited %g s for %s; no mistake is proven, so it goes on waiting",
                self.rank,
                self.patience,
                call.describe(),
            )

    def _new_key(self) -> str:
        return f"position/{self._store.add('published', 1)}"

    def _withdraw(self) -> None:
        self._store.set(self._key, "")
        self._key = ""
        self._suspected = {}
        self._store.compare_set("judge", str(self.rank), "")

    def _positions(self) -> list[Position]:
        count = self._store.add("published", 0)
        keys = [f"position/{i}" for i in range(1, count + 1)]
        texts = [self._store.get(key).decode() for key in keys if self._store.check([key])]
        return [Position.from_json(json.loads(text)) for text in texts if text]

    def _verdict(self) -> str | None:
        return self._store.get("verdict").decode() if self._store.check(["verdict"]) else None

    def _judge(self, call: _Call) -> str | None:
        """Compare positions, if this rank is the one that does; what it proves."""
        if self._store.compare_set("judge", "", str(self.rank)).decode() != str(self.rank):
            return None
        positions = self._positions()
        found = judge({p.rank: p for p in positions}, self.size)
        if found is None:
            self._suspected, self._proven = {}, math.inf
            self._ask(call, positions)
            return None
        # Positions are read one after the other. What rests on who waits must still be so a while later.
        beats = {p.rank: (p.issued, p.beat) for p in positions if p.rank in found.waiting}
        before, self._suspected = self._suspected, self._suspected or beats
        # A proof can wait a little for ranks that have not told yet where they are, since the message shall name them.
        self._proven = min(self._proven, time.monotonic())
        if len(positions) < self.size and time.monotonic() - self._proven < min(self.patience, HEAR_ALL):
            return None
        if found.certain or (
            before and all(r in before and before[r][0] == i and before[r][1] < b for r, (i, b) in beats.items())
        ):
            self._store.set("verdict", found.text)
            return found.text
        if before and any(r not in before or before[r][0] != i for r, (i, _) in beats.items()):
            self._suspected = beats
        return None

    def _ask(self, call: _Call, positions: Sequence[Position]) -> None:
        """Log, once per wait, where the ranks are that do not wait: all that can be said when nothing is proven."""
        about, now = f"{call.line.name}/{call.number}", time.monotonic()
        if self._asking[0] != about:
            self._asking = (about, now)
            self._store.set("asking", about)
        there = {p.rank for p in positions}
        busy = [rank for rank in range(self.size) if rank not in there][:SHOWN]
        answers = {rank: self._answer_of(rank, about) for rank in busy}
        late = now - self._asking[1] > 2 * LOOK_FOR_OTHERS
        if self._asking[1] < math.inf and (late or all(answers.values())):
            self._asking = (about, math.inf)
            silent = "does not answer: its process is gone, or runs something that stops all its threads"
            who = "; ".join(f"rank {rank} {where or silent}" for rank, where in answers.items())
            log.warning("rank %d still waits for %s: %s", self.rank, call.describe(), who)

    def _answer(self) -> None:
        """Say where this rank is, if one that waits asks."""
        about = self._store.get("asking").decode() if self._store.check(["asking"]) else ""
        if about != self._answered:
            self._answered = about
            where = [p.text for p in activities() if p.text] + [f"at {self._where() or 'an unknown line'}"]
            self._store.set(f"busy/{self.rank}", f"{about}\nis busy {', '.join(where)}")

    def _answer_of(self, rank: int, about: str) -> str:
        if not self._store.check([f"busy/{rank}"]):
            return ""
        told, _, where = self._store.get(f"busy/{rank}").decode().partition("\n")
        return where if told == about else ""

    def _end(self, verdict: str) -> None:
        """A wait in the backend cannot be broken off, so the process ends; the others shall read the verdict first."""
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(main)) if main is not None else ""
        sys.stdout.flush()
        print(f"{stack}[ds_core] rank {self.rank}: {verdict}", file=sys.stderr, flush=True)
        time.sleep(3.0 if self.rank == 0 else 1.0)  # the store ends with rank 0
        os._exit(EXIT_CODE)

    def leave(self) -> None:
        """This process ends: those who wait for it may know."""
        error = getattr(sys, "last_value", None)
        how = f"{type(error).__name__}: {_first_line(error)}" if error is not None else "its program is over"
        self.close()
        try:
            self._store.set(self._new_key(), json.dumps(self._position(None, ended=how).as_json()))
        except RuntimeError:
            pass  # rank 0 has ended before

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)


def configure(section: Any, packages: Collection[str] = ()) -> None:
    """Put a `comms_guard` section into effect, the process group running. Every rank calls it with the same section.

    packages: top-level packages of plugins, whose lines are not shown as the user's.
    """
    global active
    import torch.distributed as dist

    world = dist.group.WORLD
    if active is not None and _worlds.get(world) is not active:
        reset()  # it watched a process group that is gone
    if not section.enabled or active is not None or world is None or dist.get_world_size() < 2:
        return
    if dist.get_backend() != "gloo":
        raise ConfigError(
            f"comms_guard.enabled: the guard watches waits on the host, and over {dist.get_backend()!r} the host does "
            "not wait; set it to false (for NCCL there is the flight recorder of torch)"
        )
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    store = dist.distributed_c10d._get_default_store()
    # A connection of its own, since a rank that waits for a key holds the other one.
    own = store.clone() if hasattr(store, "clone") else store
    made = _made.get(world, 0)
    _made[world] = made + 1
    own = PrefixStore(f"ds_core.guard/{made}", own)
    active = _worlds[world] = Guard(section.patience, own, dist.get_rank(), dist.get_world_size(), packages)
    add_interceptor(active)
    atexit.register(active.leave)


# The guard of each process group of the whole job, and how many it had: keys of the store are not used twice.
_worlds: WeakKeyDictionary[Any, Guard] = WeakKeyDictionary()
_made: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def reset() -> None:
    """Switch the guard off."""
    global active
    if active is not None:
        remove_interceptor(active)
        atexit.unregister(active.leave)
        active = None


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [""])[0]


_OURS = (os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,)


def _users(frame: Any) -> bool:
    """Whether a frame is outside this package, other installed ones and Python's own library."""
    name = frame.f_code.co_filename
    return not (
        name.startswith((*_OURS, "<"))
        or f"{os.sep}site-packages{os.sep}" in name
        or f"{os.sep}lib{os.sep}python" in name
    )
