"""One thread that works on the host beside training, on cores or with threads of its own.

Kernels and torch's operations release the interpreter's lock, so the thread computes while the main
one does, and it shares its memory. A job that raises ends its work: the later ones are not done.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ds_core import comm
from ds_core.errors import DSError
from ds_core.process import log_once
from ds_zero.comm.hierarchy import host_name

log = logging.getLogger("ds_zero")


class WorkerError(DSError, RuntimeError):
    """The thread that does optimizer steps on the host has failed."""


@dataclass(slots=True, eq=False)
class _Job:
    """One job of a worker."""

    what: str
    """In words, for messages."""

    run: Callable[[], None]
    done: Future[None] = field(default_factory=Future)


@dataclass(slots=True, eq=False)
class _Shared:
    """What a worker and its thread share. The thread has no reference to the worker itself."""

    jobs: queue.PriorityQueue[tuple[int, int, _Job | None]] = field(
        default_factory=queue.PriorityQueue
    )
    order: itertools.count[int] = field(default_factory=itertools.count)
    failure: tuple[str, BaseException] | None = None

    def put(self, priority: int, job: _Job | None) -> None:
        self.jobs.put((priority, next(self.order), job))


class HostWorker:
    """Does the jobs it is given, those with `first` before others, else in order.

    name: of the thread, and in messages.
    cores: where it runs; it uses as many threads. None: anywhere.
    threads: how many it uses without cores; 0: as many as torch does.

    The thread ends with `close`, or when nobody has the worker any more.
    """

    def __init__(self, name: str, cores: Sequence[int] | None = None, threads: int = 0) -> None:
        self.name = name
        self._shared = _Shared()
        self._open: list[Future[None]] = []
        self._thread = threading.Thread(
            target=_work,
            args=(self._shared, name, list(cores or ()), threads),
            name=name,
            daemon=True,
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._shared.put, 2, None)

    @property
    def failed(self) -> bool:
        """Whether a job has raised, so that no later one is done."""
        return self._shared.failure is not None

    def submit(self, what: str, job: Callable[[], None], *, first: bool = False) -> Future[None]:
        """Have `job` done, unless its future is cancelled before it begins.

        what: in words.

        Raises WorkerError where an earlier one has failed.
        """
        self._check()
        given = _Job(what, job)
        self._open = [f for f in self._open if not f.done()]
        self._open.append(given.done)
        self._shared.put(0 if first else 1, given)
        return given.done

    def wait(self, job: Future[None] | None) -> None:
        """Wait until a job is done. Raises WorkerError where it, or one before it, has failed."""
        while job is not None and not wait_for([job], 1.0).done:
            if not self._thread.is_alive():
                ended = ("a job", RuntimeError("the thread has ended"))
                self._shared.failure = self._shared.failure or ended
                break
        self._check()

    def wait_all(self) -> None:
        """Wait until nothing is left to do."""
        for job in self._open:
            self.wait(job)
        self._open.clear()
        self._check()

    def close(self) -> None:
        """End the thread, when its jobs are done."""
        self._end()
        self._thread.join()

    def _check(self) -> None:
        if self._shared.failure is not None:
            what, error = self._shared.failure
            raise WorkerError(
                f"rank {comm.rank()}: {self.name} died in {what}: {type(error).__name__}: {error}; "
                "the weights on the host may be half updated, so resume from the last checkpoint"
            ) from error


def _work(shared: _Shared, name: str, cores: Sequence[int], threads: int) -> None:
    """What the thread does."""
    if cores:
        os.sched_setaffinity(0, cores)  # of this thread, and of those that it starts
    if (cores or threads) and not use_threads(len(cores) or threads):
        text = "%s: this build of torch cannot give one thread its own number of threads"
        log_once(log, logging.INFO, text, name)
    while (job := shared.jobs.get()[2]) is not None:
        if shared.failure is not None:
            job.done.cancel()
        if job.done.set_running_or_notify_cancel():
            try:
                with torch.no_grad():
                    job.run()
            except BaseException as error:  # `wait` raises it, in the main thread
                shared.failure = (job.what, error)
                job.done.set_exception(error)
            else:
                job.done.set_result(None)
        del job  # while it waits it keeps no engine alive


def cores_for(kept: float) -> list[int] | None:
    """The cores of this rank's worker: all that it may use but the share `kept`, at least one.

    None: not known.

    Ranks of one host that may use the same cores divide them first.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    mine = tuple(sorted(os.sched_getaffinity(0)))
    place = [host_name(), list(mine)]
    same = [r for r, answer in enumerate(comm.all_gather_json(place)) if answer == place]
    index = same.index(comm.rank())
    count = len(same)
    mine = mine[index * len(mine) // count : (index + 1) * len(mine) // count] or (
        mine[index % len(mine)],
    )
    return list(mine[min(math.ceil(kept * len(mine)), len(mine) - 1) :])


def use_threads(count: int) -> bool:
    """Let torch use `count` threads in this thread, if its build allows that; whether it does.

    Its own `set_num_threads` would change what other threads use, and how MKL works in all of them.
    """
    torch.get_num_threads()  # its first call in a thread sets the number
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        library.omp_set_num_threads(ctypes.c_int(count))
    except (OSError, AttributeError):
        return False
    return True
