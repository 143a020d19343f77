"""The watcher: a thread that sees when this rank waits too long, tells the others, and ends the process."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Collection
from typing import Any, Protocol, runtime_checkable

import ds_core
from ds_comms_guard import judge
from ds_comms_guard.board import Board
from ds_comms_guard.ledger import Call, Ledger
from ds_comms_guard.verdict import Activity, Position
from ds_core.process import STATE

__all__ = ["EXIT_CODE", "Watcher"]

log = logging.getLogger("ds_core.comm")

EXIT_CODE = 86
"""Of a process that the guard ended."""

_CORE = os.path.dirname(os.path.abspath(ds_core.__file__)) + os.sep


@runtime_checkable
class TellsActivity(Protocol):
    """A partitioner that tells what it is doing."""

    def activity(self) -> tuple[str, int, tuple[str, ...]]:
        """The fields of an `Activity`; asked from another thread."""


class Watcher:
    """Runs until `stop`. packages: top-level names of modules whose lines are not shown as the user's."""

    def __init__(
        self, ledger: Ledger, board: Board, rank: int, size: int, patience: float, packages: Collection[str]
    ) -> None:
        self._ledger, self._board, self._rank, self._patience = ledger, board, rank, patience
        self._judge = judge.Judge(board, rank, size, patience)
        self._packages = frozenset(packages)
        self._beat = 0
        self._warned: Call | None = None
        self._answered = ""
        self._stop = threading.Event()
        self._tick = min(1.0, patience / 4)
        self._thread = threading.Thread(target=self._watch, name="ds_comms_guard watcher", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def position(self, call: Call | None, ended: str = "") -> Position:
        """Where this rank stands. call: what it waits for. ended: how it ended, "" if it did not."""
        self._beat += 1
        at = "" if ended else self._where()
        wait = call.place if call is not None else None
        return Position(self._rank, self._beat, self._ledger.histories(), wait, at, _activities(), ended)

    def _watch(self) -> None:
        asked = time.monotonic()
        while not self._stop.wait(self._tick):
            try:
                call = self._ledger.overdue(self._patience)
                if call is not None:
                    self._publish(call)
                elif self._board.published:
                    self._board.withdraw()
                    self._judge.reset()
                if call is None and time.monotonic() - asked < judge.ASK_EVERY:
                    continue
                asked = time.monotonic()
                if call is None:
                    self._answer()
                verdict = self._board.verdict() or (self._judge.consider(call) if call is not None else None)
            except RuntimeError:  # the store has gone with rank 0; gloo tells those that wait
                continue
            if verdict is not None:
                self._end(verdict)

    def _publish(self, call: Call) -> None:
        self._board.publish(self.position(call))
        if self._warned is not call:
            self._warned = call
            log.warning(
                "rank %d has waited %g s for %s; no mistake is proven, so it goes on waiting",
                self._rank,
                self._patience,
                call.describe(),
            )

    def _answer(self) -> None:
        """Say where this rank is, if one that waits asks."""
        about = self._board.question()
        if about != self._answered:
            self._answered = about
            where = [a.text for a in _activities() if a.text] + [f"at {self._where() or 'an unknown line'}"]
            self._board.answer(about, f"is busy {', '.join(where)}")

    def _end(self, verdict: str) -> None:
        """A wait in the backend cannot be broken off, so the process ends; the others shall read the verdict first."""
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(main)) if main is not None else ""
        sys.stdout.flush()
        print(f"{stack}[ds_core] rank {self._rank}: {verdict}", file=sys.stderr, flush=True)
        time.sleep(3.0 if self._rank == 0 else 1.0)  # the store ends with rank 0
        os._exit(EXIT_CODE)

    def _where(self) -> str:
        """The user's line that the main thread is at."""
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        for frame, line in traceback.walk_stack(main):
            if _users(frame) and str(frame.f_globals.get("__name__")).split(".")[0] not in self._packages:
                return f"{os.path.basename(frame.f_code.co_filename)}:{line}"
        return ""


def _users(frame: Any) -> bool:
    """Whether a frame is outside the core, installed packages and Python's own library."""
    name = frame.f_code.co_filename
    return not (
        name.startswith((_CORE, "<"))
        or f"{os.sep}site-packages{os.sep}" in name
        or f"{os.sep}lib{os.sep}python" in name
    )


def _activities() -> tuple[Activity, ...]:
    partitioners = [engine.partitioner for engine in STATE.engines]
    return tuple(Activity(*p.activity()) for p in partitioners if isinstance(p, TellsActivity))
