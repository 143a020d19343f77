"""Who waits for long says who has not come, and a job that provably cannot go on is ended.

[Note: how it is known] The core counts the calls of each group. A thread sees when this rank waits:
in the host, or, where the host goes on (NCCL), by events of the device. After half of `patience` it
publishes this rank's position (counts, place in the program) in the job's store and asks the others
for theirs; one of those who wait, the judge, reports who has not come. A collective pays for a count
alone, and the store gets once which process a rank is, and no more until somebody stands still.

[Note: how a difference is proved] With ``enabled``, `HangGuard` is called around every collective,
and folds it into its group's digest: operation, size, dtype, and what the caller said of it
(`ds_core.comm.label`). The digest is the collective's tag, which transports send along, so
collectives that do not belong together never exchange data. Only proof ends the job: two ranks made
different collectives under one number, or some wait for each other or for a rank that has ended. A
rank that is only slow proves nothing, and the others wait for it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ds_comms_guard.board import Board
from ds_comms_guard.config import CommsGuard
from ds_comms_guard.counts import Counts
from ds_comms_guard.ledger import MESSAGES, Call, Ledger
from ds_comms_guard.watcher import Watcher, first_line
from ds_core import comm
from ds_core.accelerator import get_accelerator
from ds_core.errors import CommError, LostRankError
from ds_core.plugins.discovery import discover


class GuardedWork:
    """A collective under way, of which the guard knows whether somebody waits for it."""

    __slots__ = ("_call", "_collective", "_guard", "_work")

    def __init__(
        self, work: Any, call: Call, collective: comm.Collective, guard: HangGuard
    ) -> None:
        self._work = work
        self._call = call
        self._guard = guard
        # it holds the message
        self._collective = collective if guard.ledger.device is not None else None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in its tensor.

        Raises CommError when the backend fails, saying who has ended.
        """
        ledger = self._guard.ledger
        ledger.begin_wait(self._call)
        try:
            self._work.wait() if timeout is None else self._work.wait(timeout)
        except RuntimeError as error:
            raise self._guard.explain(self._call, error) from error
        finally:
            ledger.end_wait()
        if self._collective is not None:
            ledger.note_stream(self._collective)
            self._collective = None
        return True

    def is_completed(self) -> bool:
        """Whether the result is in its tensor."""
        return bool(self._work.is_completed())


class HangGuard(comm.Interceptor):
    """Numbers this process's collectives, for a watcher that proves.

    world: the process group of the job.
    """

    order = comm.Order.CHECK

    def __init__(self, world: ProcessGroup, ledger: Ledger, watcher: Watcher) -> None:
        self.world = weakref.ref(world)
        self.ledger = ledger
        self._watcher = watcher
        self._rank = world.rank()
        self._board = watcher.board

    def around(self, collective: comm.Collective, call: Callable[[], Any]) -> Any:
        """Number a collective or message, watch who waits for it, and explain its failure."""
        ledger = self.ledger
        made = ledger.record(collective)
        ledger.begin_wait(made)
        try:
            work = call()
        except RuntimeError as error:
            raise self.explain(made, error) from error
        finally:
            ledger.end_wait()
        if ledger.device is not None:
            ledger.note_stream(collective)
        return None if work is None else GuardedWork(work, made, collective, self)

    def explain(self, call: Call, error: Exception) -> Exception:
        """The error to raise for a collective that the backend gave up: the verdict, or who has
        ended.

        Those of messages are passed on as they are.
        """
        if call.key[0] in MESSAGES or (
            isinstance(error, CommError) and not isinstance(error, LostRankError)
        ):
            return error
        text = f"rank {self._rank}: {call.describe()} failed"
        until = time.monotonic() + 2.0
        try:
            while time.monotonic() < until:
                if (verdict := self._board.verdict()) is not None:
                    return CommError(verdict)
                if ended := [p for p in self._board.positions().values() if p.ended]:
                    who = "; ".join(f"rank {p.rank} has ended ({p.ended})" for p in ended)
                    return CommError(f"{text}, for {who}. {first_line(error)}")
                time.sleep(0.1)
        except RuntimeError:
            if self._rank != 0:
                text += (
                    ", and rank 0, which keeps the job's store, does not answer: it has "
                    "probably "
                    "ended"
                )
        return CommError(f"{text}. {first_line(error)}")

    def close(self) -> None:
        """Stop watching."""
        self._watcher.stop()


_made: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""How many watchers each process group of a whole job has had: keys of the store are not used
twice.
"""

_watchers: WeakKeyDictionary[ProcessGroup, Watcher] = WeakKeyDictionary()
"""Those that only tell."""


def installed_guard() -> HangGuard | None:
    """The guard that is called around collectives now."""
    return next((i for i in comm.interceptors() if isinstance(i, HangGuard)), None)


def guard_of_job(section: CommsGuard, packages: Iterable[str] = ()) -> HangGuard | None:
    """Watch the waits of this job, and give the guard to install: the installed one, or with
    `enabled` a new one.

    Every rank calls it with the same section, the process group running.

    packages: modules whose lines are not the user's, besides those of installed plugins.

    A guard stays on when a later engine does not want it. None: nothing is to be proved, or there
    is one rank.
    """
    world = dist.group.WORLD
    installed = installed_guard()
    if installed is not None and installed.world() is not world:
        comm.remove_interceptor(installed)  # its process group is gone
        installed = None
    if installed is not None or world is None or world.size() < 2:
        return installed
    watcher = _watchers.get(world)
    if watcher is not None and (watcher.patience == section.seconds and not section.enabled):
        return None
    if watcher is not None:
        _watchers.pop(world).stop()
    _made[world] = made = _made.get(world, 0) + 1
    modules = (*packages, *(found.module for found in discover()))
    tops = {module.partition(".")[0] for module in modules}
    connect = partial(
        _connect, dist.distributed_c10d._get_default_store(), f"ds_comms_guard/{made}"
    )
    board = Board(connect, world.rank(), world.size())
    calls = Ledger(get_accelerator()) if section.enabled else Counts(get_accelerator())
    watcher = Watcher(calls, board, section.seconds, section.enabled, tops, world)
    if isinstance(calls, Ledger):
        return HangGuard(world, calls, watcher)
    _watchers[world] = watcher
    return None


def _connect(store: Any, prefix: str) -> Any:
    """A connection of its own, since a rank that waits for a key holds the other one."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(prefix, store.clone() if hasattr(store, "clone") else store)
