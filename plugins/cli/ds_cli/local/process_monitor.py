"""The processes of this host: when and how each ended, and the end of everything they started.

torch's launcher asks processes to end and waits up to 30 seconds; a rank that waits in a collective
does not react to Ctrl-C, and what a rank started itself has no parent to end it. Every rank leads a
session of its own, so whole sessions are ended here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ds_command_kit.show import say_error
from ds_command_kit.stopping import PREEMPTED, STOPS, heeded

from ds_cli.local import orphan_cleanup
from ds_cli.local.orphan_cleanup import kill_session, members, starts

DEAF_SECONDS = 3.0  # how long the main thread may take to handle a signal


class Stopped(BaseException):
    """The launcher was told to stop by signal `number` before torch took over its signals."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by signal {number}")
        self.number = number


@dataclass(frozen=True, slots=True)
class Started:
    """A process that has begun: which attempt (from 0), rank, and the session that it leads."""

    attempt: int
    local_rank: int
    rank: int
    pid: int
    session: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended."""

    code: int
    """As of subprocess: -n for signal n."""
    time: float
    """Monotonic seconds when it was noticed."""


class ProcessMonitor:
    """While entered: records how processes end, and ends what does not end by itself.

    Use it in the main thread: Python delivers signals there only.
    """

    def __init__(
        self, folder: Path, grace: float, files: Sequence[str] = (), notice: float = 0.0
    ) -> None:
        # Where the processes leave notes: that they began, and with what they failed.
        self.folder = folder
        # Seconds between the first failure, or a signal to stop, and the end by force.
        self.grace = grace
        # Removed with `folder` by `orphan_cleanup` when this process is killed.
        self.files = files
        # What SIGTERM gives instead of `grace`: a scheduler sends it before it takes the host away.
        self.notice = max(grace, notice)
        self.endings: dict[Started, Ending] = {}
        # Monotonic seconds at which this process was asked to stop.
        self.told = float("inf")
        # By attempt, or by minus the signal.
        self._timers: dict[int, threading.Timer] = {}
        # What handled each signal before, put back on leaving.
        self._handlers: dict[int, Any] = {}
        self._left = threading.Event()

    def __enter__(self) -> ProcessMonitor:
        self._cleanup = subprocess.Popen(
            [
                sys.executable,
                "-I",
                "-S",
                orphan_cleanup.__file__,
                str(self.folder),
                str(self.notice),
                *self.files,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # what kills the launcher's group must not kill it
        )
        # Python writes the numbers of signals there; a full pipe must not stop a signal's handler.
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._handlers = {number: signal.getsignal(number) for number in (*STOPS, signal.SIGCHLD)}
        self.heeded = heeded()
        for number in self.heeded:
            signal.signal(number, _raise_stopped)
        signal.signal(signal.SIGCHLD, self._child_ended)
        # torch replaces our handlers by its own; the wakeup pipe receives every signal whatever
        # handles it.
        self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="dscore-processes", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        signal.set_wakeup_fd(self._old_wakeup)
        for number, handler in self._handlers.items():
            if handler is not None:  # a library's, which Python cannot put back
                signal.signal(number, handler)
        os.close(self._write)  # the thread reads the end of the pipe and returns
        self._thread.join()
        os.close(self._read)
        for timer in self._timers.values():
            timer.cancel()
        self._dismiss_cleanup()

    def _dismiss_cleanup(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # it was killed
            self._cleanup.communicate(b".", timeout=10)

    def started(self) -> Iterator[Started]:
        """The processes that have begun, by attempt and rank."""
        for path, note in starts(self.folder):
            attempt, _, local_rank = path.stem.partition("-")
            yield Started(int(attempt), int(local_rank), **note)

    def end(self, attempt: int | None = None) -> None:
        """Kill everything in the sessions of `attempt`, or of all attempts, and return when it is
        gone.
        """
        if attempt is None and threading.current_thread() is threading.main_thread():
            # A second Ctrl-C must not interrupt the killing: processes would be left behind.
            for number in STOPS:
                signal.signal(number, signal.SIG_IGN)
        for one in self.started():
            if attempt in (None, one.attempt):
                kill_session(one.session)

    def ask(self, attempt: int) -> int:
        """Ask the processes of `attempt` to end (SIGTERM), by force after the grace; how many are
        alive.
        """
        alive = [
            one
            for one in self.started()
            if one.attempt == attempt and one.pid in members(one.session)
        ]
        for one in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGTERM)
                # A process that is stopped (SIGSTOP) handles SIGTERM only when it continues.
                os.kill(one.pid, signal.SIGCONT)
        self._end_later(attempt)
        return len(alive)

    def alive(self, attempt: int) -> bool:
        """Whether a process of `attempt` still runs."""
        return any(
            one.attempt == attempt and one.pid in members(one.session) for one in self.started()
        )

    def heed(self, attempt: int) -> bool:
        """After SIGTERM: wait until the processes of `attempt` have ended, or the notice has;
        whether they have saved.

        In the main thread. More signals of the kind are passed over.
        """
        # Schedulers send SIGTERM several times; the first one started the saving.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while self.alive(attempt):
            time.sleep(0.05)
        codes = {end.code for one, end in self.endings.items() if one.attempt == attempt}
        # torch may have collected a process before we saw its end; its note has the code too.
        for word in self.folder.glob(f"{attempt}-*.error"):
            codes.add(json.loads(word.read_text())["code"])
        return PREEMPTED in codes

    def condemn(self, one: Started, why: str) -> None:
        """End a process that is stopped; `why` is what is said of it."""
        word = {
            "time": time.monotonic(),
            "code": -int(signal.SIGSTOP),
            "error": why,
            "traceback": "",
        }
        (self.folder / f"{one.attempt}-{one.local_rank}.error").write_text(json.dumps(word))
        kill_session(one.session)

    def forget(self, attempt: int) -> None:
        """End what is left of `attempt`, and take none of its ends for a failure: processes are
        started anew.

        Under the same number, where hosts have come or gone.
        """
        self.end(attempt)
        if (timer := self._timers.pop(attempt, None)) is not None:
            timer.cancel()
        self.endings = {
            one: ending for one, ending in self.endings.items() if one.attempt != attempt
        }
        for path in self.folder.glob(f"{attempt}-*"):
            path.unlink()

    def _child_ended(self, number: int, frame: FrameType | None) -> None:
        """On SIGCHLD, before torch collects the child: note how and when it ended, and leave it
        collectable.
        """
        for one in self.started():
            if one in self.endings:
                continue
            # WNOWAIT leaves the process for torch, whose launcher waits for it as well.
            try:
                seen = os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            # collected before we came; macOS has waitid since 3.13
            except (ChildProcessError, AttributeError):
                continue
            if seen is not None:
                code = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
                self.endings[one] = Ending(code, time.monotonic())
                # The others may wait for the failed one for ever, in a collective.
                if code != 0:
                    self._end_later(one.attempt)

    def _listen(self) -> None:
        while heard := os.read(self._read, 64):
            number = next((n for n in STOPS if n in heard), None)
            if number is not None:
                # Ctrl-C twice does not begin a new grace.
                self.told = min(self.told, time.monotonic())
                seconds = self.notice if number == signal.SIGTERM else self.grace
                self._later(
                    -number, seconds if any(self.started()) else 0, partial(self._force, number)
                )

    def _end_later(self, attempt: int) -> None:
        self._later(attempt, self.grace, partial(self.end, attempt))

    def _later(self, key: int, seconds: float, act: Callable[[], None]) -> None:
        if key not in self._timers:
            self._timers[key] = timer = threading.Timer(seconds, act)
            timer.daemon = True
            timer.start()

    def _force(self, number: int) -> None:
        """End all, and this process too if its main thread waits inside torch for hosts that do
        not come.
        """
        self.end()
        if not self._left.wait(DEAF_SECONDS):
            with contextlib.suppress(OSError):
                say_error(f"stopped by {signal.Signals(number).name}; all processes were ended")
            self.leave(128 + number)

    def leave(self, code: int) -> NoReturn:
        """End this process here and now, from any thread, when its main thread cannot; nothing is
        left behind.
        """
        for one in self.started():
            kill_session(one.session)
        self._dismiss_cleanup()
        for path in map(Path, self.files):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        # `os._exit` runs no handlers and flushes nothing: the message would be lost.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)
