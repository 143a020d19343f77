"""The pipeline in which a group's two-level collectives run: the next blocks are on the wire while
one is worked on.

A collective is cut into blocks. A block is a generator, of stages: it yields the messages to wait
for, and is resumed when they are there. Blocks of the next collective follow those of the last one
without a gap, where they are asynchronous.

[Note: one order] Ranks of a host meet in its transport between messages, so on all of them the same
blocks must be started and resumed in the same order. It follows from the collectives' order and
sizes alone; only whether the next collective was called already is not known to all, so they agree
on it.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from ds_comm_gloo.group_queue import QueueWork

AHEAD = 4
"""Blocks that are on the wire before the oldest one is waited for."""

Stages = Iterator[Sequence[Any]]


class _Job:
    """A collective."""

    def __init__(self, call: Callable[[], Iterable[Stages]], inference: bool) -> None:
        # Gives its blocks.
        self.call = call
        self.inference = inference
        self.done = Future[None]()
        # How many of its blocks are, and whether all have been started.
        self.under_way = 0
        self.started = False


class Pipeline:
    """Runs collectives in the order of their calls.

    agree: whether all ranks of the host say so; collective on it.
    """

    def __init__(self, agree: Callable[[bool], bool]) -> None:
        self._agree = agree
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._last: Future[None] | None = None
        self._started = False

    def run(
        self, call: Callable[[], Iterable[Stages]], async_op: bool, inference: bool
    ) -> QueueWork | None:
        """Run the collective whose blocks `call` gives, after all that were called before it."""
        job = _Job(call, inference)
        if not async_op:
            if self._last is not None:
                self._last.exception()  # only its end matters here; its own wait() raises
                self._last = None
            belt = _Belt()  # the thread's may still be looking at its own
            belt.take(job)
            while not belt.empty:
                belt.step()
            job.done.result()
            return None
        if not self._started:
            arguments = (self._agree, self._jobs)
            threading.Thread(
                target=_serve, args=arguments, name="ds_comm_gloo pipeline", daemon=True
            ).start()
            weakref.finalize(self, self._jobs.put, None)  # the thread ends with the pipeline
            self._started = True
        self._last = job.done
        self._jobs.put(job)
        return QueueWork(job.done)


class _Belt:
    """Blocks under way, the oldest first, and the collectives they belong to."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[Stages, Sequence[Any], _Job]] = deque()
        self._jobs: deque[_Job] = deque()

    @property
    def empty(self) -> bool:
        """Whether nothing is under way."""
        return not self._jobs

    def take(self, job: _Job) -> None:
        """Start all blocks of `job`; the last ones stay under way."""
        self._jobs.append(job)
        try:
            with torch.inference_mode(job.inference), torch.no_grad():  # both are per thread
                for stages in job.call():
                    self._advance(len(self._blocks) - AHEAD)
                    self._blocks.append((stages, next(stages), job))
                    job.under_way += 1
        except BaseException as error:
            self.fail(error)
            return
        job.started = True
        self._settle()

    def step(self) -> None:
        """Resume the oldest block; no more, so that the next collective begins while the others are
        on the wire.
        """
        try:
            self._advance(1)
        except BaseException as error:
            self.fail(error)

    def _advance(self, count: int) -> None:
        """Resume the oldest `count` blocks, one after the other."""
        for _ in range(count):
            stages, works, job = self._blocks.popleft()
            for work in works:
                work.wait()
            with torch.inference_mode(job.inference), torch.no_grad():
                coming = next(stages, None)
            if coming is None:
                job.under_way -= 1
            else:
                # Behind the others, whose messages have come or will before its new ones.
                self._blocks.append((stages, coming, job))
        self._settle()

    def _settle(self) -> None:
        """Tell whose collectives have ended; in their order, so that the last one's end is the end
        of all.
        """
        while self._jobs and self._jobs[0].started and not self._jobs[0].under_way:
            self._jobs.popleft().done.set_result(None)

    def fail(self, error: BaseException) -> None:
        """What is under way has failed with one of its blocks: the ranks of the host are no longer
        at one place.
        """
        self._blocks.clear()
        while self._jobs:
            self._jobs.popleft().done.set_exception(error)


def _serve(agree: Callable[[bool], bool], jobs: queue.SimpleQueue[_Job | None]) -> None:
    """Take jobs as they come, the next one before the last one has ended, until None comes."""
    belt = _Belt()
    while (job := jobs.get()) is not None:
        belt.take(job)
        del job  # its tensors must not live until the next one
        while not belt.empty:
            try:
                follow = agree(not jobs.empty())
            except BaseException as error:
                belt.fail(error)
                break
            if follow:
                break
            belt.step()
