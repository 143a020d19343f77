"""`Background`: a monitor whose work is done by a thread, so that no step waits for a disk or a
network (torch-free).

Events go to a queue. The thread takes them from there in order, reads tensors, and calls the
monitor. What fails in it is raised from the next call, so that the engine switches the monitor off
with one warning. At the end of the program what is queued is written before packages close what
they have open.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ds_core.entries import Event
from ds_core.errors import PluginError
from ds_monitor_kit.calling import hiding, telling

if TYPE_CHECKING:
    from ds_core.engine import Monitor

log = logging.getLogger("ds_monitor_kit")

QUEUED = 4096
"""Batches of events, one per step, that may wait."""
PAUSE = 1.0
"""Seconds for which a thread lets events gather once it has written all: waking up in every step
would cost more.
"""
PATIENCE = 10.0
"""Seconds that a step waits for a full queue, once, before the monitor is given up."""
LAST_PATIENCE = 300.0
"""Seconds without progress after which `flush`, `close` and the end of the program wait no longer.
"""


class Background:
    """A monitor that calls `monitor` in a thread.

    Order is kept; `flush` and `close` return when all is done.

    A forked process writes nothing: what is queued is its parent's. queued, patience,
    last_patience, told: for tests.
    """

    takes_tensors = True

    def __init__(
        self,
        monitor: Monitor,
        *,
        queued: int = QUEUED,
        patience: float = PATIENCE,
        last_patience: float = LAST_PATIENCE,
        told: float | None = None,
    ) -> None:
        self.name = monitor.name
        self._patience = patience
        self._worker = _Worker(monitor, queued, last_patience, told)
        # An engine that is dropped without `destroy`: the thread finishes, and ends.
        weakref.finalize(self, self._worker.leave).atexit = False

    def write_events(self, events: Sequence[Event]) -> None:
        """Queue events; tensors are copied as they are now.

        Raises what has failed, and TimeoutError when stuck.
        """
        self._worker.ask(_snapshot(events), self._patience)

    def flush(self) -> None:
        """Return when everything so far is readable by others."""
        self._worker.finish(lambda monitor: monitor.flush())

    def close(self) -> None:
        """Write what is queued, and close the monitor; harmless when it is closed."""
        self._worker.finish(lambda monitor: monitor.close(), last=True)


Job = Callable[["Monitor"], Any]


class _Worker:
    """The queue, and the thread that empties it, which starts with the first job; it knows no
    `Background`.
    """

    def __init__(
        self, monitor: Monitor, queued: int, last_patience: float, told: float | None
    ) -> None:
        self._monitor = monitor
        self._last_patience = last_patience
        self._told = told
        # A SimpleQueue can be put into by a finalizer, which may run in the middle of anything.
        self._jobs: queue.SimpleQueue[tuple[Job, threading.Event | None] | None] = (
            queue.SimpleQueue()
        )
        self._room = threading.Semaphore(queued)
        self._starting = threading.Lock()
        self._hurry = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._done = 0
        self._closed = False
        self._pid = os.getpid()

    def ask(self, job: Job, patience: float, ended: threading.Event | None = None) -> None:
        """Queue a job.

        Raises the error that came before it, and TimeoutError when there is no room for it in time.
        """
        if os.getpid() != self._pid:
            return
        self._raise()
        if self._closed:
            raise ValueError(f"the monitor {self._monitor.name} is closed")
        self._start()
        if not self._room.acquire(timeout=patience):
            self._end()
            raise TimeoutError(
                f"it has taken nothing for {patience:g} s; {self._jobs.qsize()} batches of events "
                "wait"
            )
        self._jobs.put((job, ended))

    def finish(self, job: Job, *, last: bool = False) -> None:
        """Return when all jobs and then `job` are done; `last`: there will be no other."""
        if os.getpid() != self._pid or self._closed:
            return
        with telling(self._monitor.name, "end" if last else "flush", self._told):
            self._finish(job, last)

    def _finish(self, job: Job, last: bool) -> None:
        if self._thread is None:  # nothing was written
            self._closed = last
            with hiding(self._monitor.name):
                job(self._monitor)
            return
        ended = threading.Event()
        done = -1
        self.ask(job, self._last_patience, ended)
        self._hurry.set()
        if last:
            self._end()
        while not ended.wait(self._last_patience):
            if done == self._done:
                self._end()
                raise TimeoutError(
                    f"it has made no progress for {self._last_patience:g} s, and is waited for no "
                    "longer"
                )
            done = self._done
        if self._error is not None:
            self._end()
            raise self._error

    def leave(self) -> None:
        """Nobody will ask again: finish without being waited for."""
        if self._thread is not None and not self._closed and os.getpid() == self._pid:
            self._jobs.put((lambda monitor: monitor.close(), None))
            self._end()

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name=f"monitor {self._monitor.name}", daemon=True
                )
                self._thread.start()
                # this late, it is called before what the monitor's package registered
                atexit.register(self._at_exit)

    def _end(self) -> None:
        """No job comes after those that are queued."""
        self._closed = True
        atexit.unregister(self._at_exit)
        self._jobs.put(None)
        self._hurry.set()

    def _raise(self) -> None:
        if self._error is not None and not self._closed:
            self._end()
            raise self._error

    def _work(self) -> None:
        for job, ended in iter(self._jobs.get, None):
            if self._error is None:
                try:
                    with hiding(self._monitor.name):
                        job(self._monitor)
                except Exception as error:
                    self._fail(error)
                # it is raised in a step, where it must not end the program
                except BaseException as error:
                    self._fail(
                        PluginError(f"{self._monitor.name}: {type(error).__name__}: {error}")
                    )
            self._done += 1
            self._room.release()
            if ended is not None:
                self._hurry.clear()
                ended.set()
            elif self._jobs.empty():
                self._hurry.wait(PAUSE)

    def _fail(self, error: Exception) -> None:
        """Take no more: the next call raises `error`."""
        self._error = error
        with contextlib.suppress(BaseException):  # of any kind: the queue must not fill up
            self._monitor.close()

    def _at_exit(self) -> None:
        try:
            self.finish(lambda monitor: monitor.flush())
        except Exception as error:
            log.warning(
                "monitor %s failed at the end: %s: %s",
                self._monitor.name,
                type(error).__name__,
                error,
            )


def _snapshot(events: Sequence[Event]) -> Job:
    """Gives `events` to a monitor later, with numbers for tensors, as they are now; only that waits
    for the device.
    """
    pending: dict[int, Any] = {
        i: e.value for i, e in enumerate(events) if hasattr(e.value, "detach")
    }
    if not pending:
        return lambda monitor: monitor.write_events(
            [event._replace(value=float(event.value)) for event in events]
        )
    import torch

    from ds_core.accelerator import get_accelerator

    values = torch.stack([t.detach().reshape(()) for t in pending.values()]).to(
        "cpu", non_blocking=True
    )
    copied = get_accelerator().new_event()
    copied.record()

    def write(monitor: Monitor) -> None:
        copied.synchronize()
        found = dict(zip(pending, values.tolist(), strict=True))
        monitor.write_events(
            [
                e._replace(value=found[i] if i in found else float(e.value))
                for i, e in enumerate(events)
            ]
        )

    return write
