"""The watcher: a thread that sees when this rank waits too long, tells the others, and may end the
process.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Collection
from queue import Empty, SimpleQueue
from typing import Any, Protocol, runtime_checkable

from torch.distributed import ProcessGroup

from ds_comms_guard.board import Board, Question
from ds_comms_guard.counts import Counts
from ds_comms_guard.judge import Judge
from ds_comms_guard.ledger import Ledger
from ds_comms_guard.processes import Home, torch_call, user_line
from ds_comms_guard.verdict import Activity, Position
from ds_comms_guard.waits import Wait, Waits
from ds_core.process import STATE

log = logging.getLogger("ds_core.comm")

EXIT_CODE = 86
"""Of a process that the guard ended."""


@runtime_checkable
class TellsActivity(Protocol):
    """A partitioner that tells what it is doing."""

    def activity(self) -> tuple[str, int, tuple[str, ...], tuple[str, ...]]:
        """The fields of an `Activity`; asked from another thread."""


class Watcher:
    """Runs until `stop`, or until the process group is gone.

    world: the process group.
    proves: whether the job ends when positions prove that it cannot go on.
    packages: top-level names of modules whose lines are not shown as the user's.

    The store is looked at when this rank has waited for half of `patience`, or has made no
    collective for a quarter of it, and else after every half.
    """

    def __init__(
        self,
        calls: Ledger | Counts,
        board: Board,
        patience: float,
        proves: bool,
        packages: Collection[str],
        world: ProcessGroup,
    ) -> None:
        self._calls = calls
        self.board = board
        self.patience = patience
        self._proves = proves
        self._rank = board.rank
        self._packages = frozenset(packages)
        self._tick = min(5.0, patience / 10)
        self._waits = Waits(calls, patience / 4, self._packages)
        self._judge = Judge(board, patience, self._tick, proves)
        # the keeper of the store: rank 0, as far as known
        self._home = Home.here()
        self._keeper = Home("", "", 0, "")
        self._introduced = self._waited = self._lost = False
        # the last one that was seen
        self._beat = 0
        self._question = Question()
        self._alone_due = patience * (1 if self._rank == 1 else 2)  # one is enough, if it can
        # A queue, since a garbage collection may end the process group in any thread, in the middle
        # of anything: the lock of an Event might be held there. A watcher that outlived the group
        # would keep its store open.
        self._ends: SimpleQueue[Any] = SimpleQueue()
        self._world = weakref.ref(world, self._ends.put)
        self._thread = threading.Thread(
            target=self._watch, name="ds_comms_guard watcher", daemon=True
        )
        self._thread.start()
        atexit.register(self._leave)

    def stop(self) -> None:
        """Stop watching."""
        atexit.unregister(self._leave)
        self._ends.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def position(self, wait: Wait | None, ended: str = "") -> Position:
        """Where this rank stands.

        wait: what it waits for.
        ended: how it ended, "" if it did not.
        """
        self._beat += 1
        return Position(
            self._rank,
            self._beat,
            self._calls.histories(),
            wait.call if wait is not None else None,
            "" if ended else user_line(self._packages),
            _activities(),
            ended,
            wait.text if wait is not None else "",
            wait is not None and wait.queued,
            self._question.id,
            str(self._home),
        )

    def _watch(self) -> None:
        looked = time.monotonic()
        while not self._ended(self._tick if self._introduced or self._lost else 0.0):
            wait = self._overdue(self.patience / 2)
            now = time.monotonic()
            # A rank that makes collectives leaves the store alone, but for a look now and then.
            moves = wait is None and not self._waited and not self._waits.still()
            if self._lost:
                self._tell_alone(wait, "has gone")
            elif not self._introduced or not moves or now - looked >= self.patience / 2:
                looked = now
                self._talk(wait)
        atexit.unregister(self._leave)  # it holds this watcher, and so the store

    def _ended(self, seconds: float) -> bool:
        """Whether watching has ended within `seconds`."""
        try:
            self._ends.get(timeout=seconds)
        except Empty:
            return False
        return True

    def _talk(self, wait: Wait | None) -> None:
        """Converse.

        If the store's process is stopped, that blocks, so another thread looks at this rank's
        waits.
        """
        answered = threading.Event()
        threading.Thread(target=self._watch_alone, args=(answered,), daemon=True).start()
        verdict = None
        try:
            verdict = self._converse(wait)
        except RuntimeError:  # its process has ended; gloo tells those that wait
            self._lost = True
        finally:
            answered.set()
        if verdict is not None:
            self._end(verdict)

    def _overdue(self, seconds: float) -> Wait | None:
        wait = self._waits.look()
        return wait if wait is not None and time.monotonic() - wait.since >= seconds else None

    def _converse(self, wait: Wait | None) -> str | None:
        """Say what has changed, hear what was asked, and judge: the verdict, if there is one."""
        if not self._introduced:
            self.board.introduce(self._home)
            self._introduced = True
        # Who keeps the store is known early, since it cannot be asked once it is silent.
        if not self._keeper.pid:
            self._keeper = self.board.homes([0]).get(0, self._keeper)
        question = self.board.question()
        news = question != self._question
        self._question = question
        # A position is published where another rank may need it: while waiting, once after it, and
        # on request.
        if wait is not None or self._waited or news:
            self.board.publish(self.position(wait))
        # This rank can look at the processes of its own host for ranks that do not answer.
        for rank, home in question.silent.items() if news else ():
            if home.machine == self._home.machine and rank != self._rank:
                self.board.tell_state(rank, question, home.state())
        # A rank that continues cannot judge those that wait.
        if wait is None and self._waited:
            self.board.resign()
            self._judge.reset()
        self._waited = wait is not None
        verdict = self.board.verdict() if self._proves else None
        return self._judge.consider(wait) if verdict is None and wait is not None else verdict

    def _watch_alone(self, answered: threading.Event) -> None:
        """Tell of this rank's wait while the store does not answer."""
        if answered.wait(self.patience / 4):
            return
        while not answered.wait(self._tick) and self._ends.empty():
            self._tell_alone(self._overdue(self.patience / 2), "does not answer")

    def _tell_alone(self, wait: Wait | None, why: str) -> None:
        """What this rank knows by itself."""
        waited = time.monotonic() - wait.since if wait is not None else 0.0
        here = self._keeper.machine == self._home.machine
        # Of a keeper that is stopped or has ended nothing more can be learnt, so it is reported in half
        # the time.
        share = 0.5 if here and self._keeper.state().settled else 1.0
        if wait is None or waited < share * self._alone_due:
            return
        self._alone_due = 2 * waited / share
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        keeper = "the launcher keeps it" if agent else "rank 0 keeps it"
        if here:
            keeper += f"; rank 0 ({self._keeper}) {self._keeper.state().text}"
        elif self._keeper.pid:
            keeper += f"; rank 0 is {self._keeper}"
        log.warning(
            "rank %d has waited %.3g s for %s, at %s; nothing is known of the others, since the "
            "job's store %s (%s)",
            self._rank,
            waited,
            wait.text,
            user_line(self._packages),
            why,
            keeper,
        )

    def _leave(self) -> None:
        """This process ends: those who wait for it may know."""
        # Set by the interpreter when an exception ends the program.
        error = getattr(sys, "last_value", None)
        how = (
            f"{type(error).__name__}: {first_line(error)}"
            if error is not None
            else "its program is over"
        )
        self.stop()
        if not self._introduced or self._lost or os.getpid() != self._home.pid:
            return
        try:
            self.board.publish(self.position(None, ended=how))
            if error is not None and (call := torch_call(error.__traceback__)):
                self._tell_end(call)
        except RuntimeError:
            pass  # who keeps the store has ended before

    def _tell_end(self, call: str) -> None:
        """A function of torch.distributed has failed, by which error says nothing of the others:
        tell who has ended.
        """
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            if ended := [
                p for p in self.board.positions().values() if p.ended and p.rank != self._rank
            ]:
                who = "; ".join(f"rank {p.rank} ({p.home}) has ended ({p.ended})" for p in ended)
                log.warning("rank %d failed in %s; %s", self._rank, call, who)
                return
            time.sleep(0.1)

    def _end(self, verdict: str) -> None:
        """A wait in the backend cannot be broken off, so the process ends; the others shall read
        the verdict first.
        """
        # The stack of the thread that waits shows which call of the user's it is.
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(main)) if main is not None else ""
        sys.stdout.flush()
        print(f"{stack}[ds_core] rank {self._rank}: {verdict}", file=sys.stderr, flush=True)
        time.sleep(3.0 if self._rank == 0 else 1.0)  # the store ends with rank 0
        os._exit(EXIT_CODE)


def first_line(error: BaseException) -> str:
    """Of its message."""
    return (str(error).strip().splitlines() or [""])[0]


def _activities() -> tuple[Activity, ...]:
    partitioners = [engine.partitioner for engine in STATE.engines]
    return tuple(Activity(*p.activity()) for p in partitioners if isinstance(p, TellsActivity))
