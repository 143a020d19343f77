"""One thread that works on the host beside training, on cores of its own.

Kernels and torch's operations release the interpreter's lock, so the thread computes while the main
one does, and it shares its memory. What it raises ends its work: who waits for a job of it then
gets `WorkerError`.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ds_core import comm
from ds_core.errors import DSError
from ds_zero.comm.hierarchy import host_name


class WorkerError(DSError, RuntimeError):
    """The thread that does optimizer steps on the host has failed."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One job. what: in words, for messages."""

    what: str
    job: Callable[[], None]
    done: threading.Event = field(default_factory=threading.Event)


class HostWorker:
    """Does the jobs it is given, those with `first` before others, else in order.

    name: of the thread, and in messages. cores: where it runs; it uses as many threads. None:
    anywhere.
    """

    def __init__(self, name: str, cores: Sequence[int] | None = None) -> None:
        self.name = name
        self.cores = list(cores) if cores else None
        self._jobs: queue.PriorityQueue[tuple[int, int, Ticket | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._open: list[Ticket] = []
        self._failure: tuple[str, BaseException] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, what: str, job: Callable[[], None], *, first: bool = False) -> Ticket:
        """Have `job` done; what: in words. Raises WorkerError where an earlier one has failed."""
        self._check()
        ticket = Ticket(what, job)
        self._open = [t for t in self._open if not t.done.is_set()]
        self._open.append(ticket)
        self._jobs.put((0 if first else 1, next(self._order), ticket))
        return ticket

    def wait(self, ticket: Ticket | None) -> None:
        """Wait until a job is done. Raises WorkerError where it, or one before it, has failed."""
        while ticket is not None and not ticket.done.wait(1.0):
            if not self._thread.is_alive():
                self._failure = self._failure or (ticket.what, RuntimeError("the thread has ended"))
                break
        self._check()

    def wait_all(self) -> None:
        """Wait until nothing is left to do."""
        for ticket in self._open:
            self.wait(ticket)
        self._open.clear()
        self._check()

    def close(self) -> None:
        """End the thread, when its jobs are done."""
        if self._thread.is_alive():
            self._jobs.put((2, next(self._order), None))
            self._thread.join()

    def _check(self) -> None:
        if self._failure is not None:
            what, error = self._failure
            raise WorkerError(
                f"rank {comm.rank()}: {self.name} died in {what}: {type(error).__name__}: {error}; "
                "the weights on the "
                "host may be half updated, so go on from the last checkpoint"
            ) from error

    def _run(self) -> None:
        if self.cores:
            os.sched_setaffinity(0, self.cores)  # of this thread, and of those that it starts
            use_threads(len(self.cores))
        while (ticket := self._jobs.get()[2]) is not None:
            try:
                if self._failure is None:
                    with torch.no_grad():
                        ticket.job()
            except BaseException as error:  # told by `wait`, in the main thread
                self._failure = (ticket.what, error)
            finally:
                ticket.done.set()


def cores_for(kept: float) -> list[int] | None:
    """The cores of this rank's worker: all that it may use but the share `kept`, at least one.
    None: not known.

    Ranks of one host that may use the same cores divide them first.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    mine = tuple(sorted(os.sched_getaffinity(0)))
    index = 0
    count = 1
    if comm.world_size() > 1:
        here = [host_name(), list(mine)]
        same = [r for r, answer in enumerate(comm.all_gather_json(here)) if answer == here]
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
    torch.get_num_threads()  # it sets the number when it is first asked in a thread
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        library.omp_set_num_threads(ctypes.c_int(count))
    except (OSError, AttributeError):
        return False
    return True
