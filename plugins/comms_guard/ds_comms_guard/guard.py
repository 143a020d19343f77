"""Ranks that do not make the same collectives in the same order get an error, instead of waiting for the time-out.

[Note: how it is known] Every collective of a group gets a number and is folded into the group's digest: operation,
size, dtype, and what the caller said of it (`ds_core.comm.label`). The digest is the collective's tag, which transports
send along, so collectives that do not belong together never exchange data. Whoever waits longer than `patience` seconds
publishes its position (number, digests, place in the program) in the job's store; one of those who wait compares. Only
proof ends the job: two ranks made different collectives under one number, or some wait for each other or for a rank
that has ended. A rank that is only slow proves nothing, and the others wait for it; it is asked where it is, which is
logged.

The fast path costs a dict look-up and a small object per collective; the store is asked nothing until somebody waits.
"""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_comms_guard.board import Board
from ds_comms_guard.config import CommsGuard
from ds_comms_guard.ledger import Call, Ledger
from ds_comms_guard.watcher import Watcher
from ds_core import comm
from ds_core.errors import CommError, ConfigError, LostRankError
from ds_core.plugins import discover

__all__ = ["HangGuard", "guard_of_job", "installed_guard"]

_MESSAGES = ("send", "recv", "isend", "irecv")


class GuardedWork:
    """A collective under way, of which the guard knows whether somebody waits for it."""

    __slots__ = ("_call", "_guard", "_work")

    def __init__(self, work: Any, call: Call, guard: HangGuard) -> None:
        self._work, self._call, self._guard = work, call, guard

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in its tensor. Raises CommError when the backend fails, saying who has ended."""
        ledger = self._guard.ledger
        ledger.begin_wait(self._call)
        try:
            self._work.wait() if timeout is None else self._work.wait(timeout)
        except RuntimeError as error:
            raise self._guard.explain(self._call, error) from error
        finally:
            ledger.end_wait()
        return True

    def is_completed(self) -> bool:
        """Whether the result is in its tensor."""
        return bool(self._work.is_completed())


class HangGuard(comm.Interceptor):
    """Numbers this process's collectives, and watches for waits without end.

    world: the process group of the job. store: the job's, for this guard alone. patience: seconds. packages: top-level
    names of modules whose lines are not shown as the user's.
    """

    order = comm.Order.CHECK

    def __init__(self, world: ProcessGroup, store: Any, patience: float, packages: Iterable[str] = ()) -> None:
        self.world = weakref.ref(world)
        self.ledger = Ledger()
        self._rank = world.rank()
        self._board = Board(store, self._rank)
        self._watcher = Watcher(self.ledger, self._board, self._rank, world.size(), patience, frozenset(packages))
        atexit.register(self._leave)

    def around(self, collective: comm.Collective, call: Callable[[], Any]) -> Any:
        """Number a collective, watch who waits for it, and explain its failure. Messages pass as they are."""
        if collective.op in _MESSAGES:
            return call()
        made = self.ledger.record(collective)
        self.ledger.begin_wait(made)
        try:
            work = call()
        except RuntimeError as error:
            raise self.explain(made, error) from error
        finally:
            self.ledger.end_wait()
        return None if work is None else GuardedWork(work, made, self)

    def explain(self, call: Call, error: Exception) -> Exception:
        """The error to raise for a collective that the backend gave up: the verdict, or who has ended."""
        if isinstance(error, CommError) and not isinstance(error, LostRankError):
            return error
        text = f"rank {self._rank}: {call.describe()} failed"
        until = time.monotonic() + 2.0
        try:
            while time.monotonic() < until:
                if (verdict := self._board.verdict()) is not None:
                    return CommError(verdict)
                if ended := [p for p in self._board.positions() if p.ended]:
                    who = "; ".join(f"rank {p.rank} has ended ({p.ended})" for p in ended)
                    return CommError(f"{text}, for {who}. {_first_line(error)}")
                time.sleep(0.1)
        except RuntimeError:
            if self._rank != 0:
                text += ", and rank 0, which keeps the job's store, does not answer: it has probably ended"
        return CommError(f"{text}. {_first_line(error)}")

    def close(self) -> None:
        """Stop watching."""
        atexit.unregister(self._leave)
        self._watcher.stop()

    def _leave(self) -> None:
        """This process ends: those who wait for it may know."""
        error = getattr(sys, "last_value", None)
        how = f"{type(error).__name__}: {_first_line(error)}" if error is not None else "its program is over"
        self._watcher.stop()
        try:
            self._board.publish(self._watcher.position(None, ended=how))
        except RuntimeError:
            pass  # rank 0 has ended before


_made: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""How many guards each process group of a whole job has had: keys of the store are not used twice."""


def installed_guard() -> HangGuard | None:
    """The guard that is called around collectives now."""
    return next((i for i in comm.interceptors() if isinstance(i, HangGuard)), None)


def guard_of_job(section: CommsGuard, packages: Iterable[str] = ()) -> HangGuard | None:
    """The guard to install: the installed one, or a new one; None when none is wanted or there is one rank.

    Every rank calls it with the same section, the process group running. packages: modules whose lines are not the
    user's, besides those of installed plugins. A guard stays on when a later engine does not want it.
    Raises ConfigError over a backend other than gloo.
    """
    world, installed = dist.group.WORLD, installed_guard()
    if installed is not None and installed.world() is not world:
        comm.remove_interceptor(installed)  # it watched a process group that is gone
        installed = None
    if installed is not None or not section.enabled or world is None or world.size() < 2:
        return installed
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
    modules = (*packages, *(found.module for found in discover()))
    tops = {module.partition(".")[0] for module in modules}
    return HangGuard(world, PrefixStore(f"ds_comms_guard/{made}", own), section.patience, tops)


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip().splitlines() or [""])[0]
