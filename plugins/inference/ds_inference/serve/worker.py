"""The generator in a thread of its own, and what requests on the event loop see of it.

The thread alone touches the generator (`driver`). Requests reach it as commands in a queue, and
tokens go back to the event loop, those of one step at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ds_core.errors import DSError
from ds_inference.generate.requests import Finish, Output, SamplingParams
from ds_inference.serve.driver import STOP, Command, Driver, Link, cancel, submit
from ds_inference.serve.http.errors import Refusal, describe

if TYPE_CHECKING:
    from ds_inference.generate.generator import Generator

log = logging.getLogger("ds_inference.serve")

_IDLE = 30.0
"""Seconds after which ranks that wait for commands are sent none."""


class Gone(Exception):
    """The client is not there any more."""


class Worker:
    """Owns `generator`, in a thread.

    most_waiting: answers that may wait for their first token.
    link: gives commands to all ranks that have a part of the model.
    failed: called on the event loop where a step fails.
    """

    def __init__(
        self,
        generator: Generator,
        *,
        most_waiting: int,
        link: Link = lambda commands: commands,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self.generator = generator
        self.most_waiting = most_waiting
        self._link = link
        self._failed = failed
        # The only way into the thread.
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="generator", daemon=True)
        self._numbers = itertools.count()
        # By number, the request's ticket and which of its answers it is.
        self._tickets: dict[int, tuple[Ticket, int]] = {}  # of the event loop
        # answers without a token yet, since when, the oldest first
        self.waiting: dict[int, float] = {}
        self.healthy = True

    # -- on the event loop -------------------------------------------------------------------------

    def start(self) -> None:
        """Begin, on the event loop that runs now."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, timeout: float = 30.0) -> bool:
        """End the thread after its step; whether it ended in time."""
        self._inbox.put(STOP)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def active(self) -> int:
        """Answers that are not finished."""
        return len(self._tickets)

    @contextlib.contextmanager
    def open(
        self, prompts: Sequence[tuple[Sequence[int], SamplingParams]], timeout: float
    ) -> Iterator[Ticket]:
        """Submit answers; what is left of them at the end of the block is cancelled.

        Refusal where too many wait.
        """
        if not self.healthy:
            raise Refusal(503, "the model's process failed; see the server's log")
        if len(prompts) > self.most_waiting:
            raise Refusal(
                400,
                f"this server takes requests for {self.most_waiting} answers at most",
                param="n",
            )
        # Before anything is queued: a request is accepted as a whole or not at all.
        if len(self.waiting) + len(prompts) > self.most_waiting:
            raise self._full()
        numbers = [next(self._numbers) for _ in prompts]
        ticket = Ticket(self, numbers)
        late = Refusal(504, "the answer took too long", "timeout")
        # One clock for all answers of the request.
        timer = self._loop.call_later(timeout, ticket.fail, late)
        for index, (number, (prompt, params)) in enumerate(zip(numbers, prompts, strict=True)):
            self._tickets[number] = ticket, index
            self.waiting[number] = self._loop.time()
            self._inbox.put(submit(number, prompt, params))
        try:
            yield ticket
        finally:
            timer.cancel()
            for number in numbers:
                self.cancel(number)

    def _full(self) -> Refusal:
        oldest = next(iter(self.waiting.values()), self._loop.time())
        # As long as the oldest has waited: what comes now will wait about as long.
        again = min(max(math.ceil(self._loop.time() - oldest), 1), 60)
        text = (
            f"{len(self.waiting)} answers wait already, of {self.most_waiting} at most; try "
            "again "
            f"in {again} s"
        )
        return Refusal(429, text, "rate_limit_exceeded", retry_after=again)

    def cancel(self, number: int) -> None:
        """Forget an answer; nothing where it has ended."""
        if self._tickets.pop(number, None) is not None:
            self.waiting.pop(number, None)
            self._inbox.put(cancel(number))

    def fail_all(self, error: Exception) -> None:
        """Every open request ends with `error`."""
        # A ticket is in the table once for each of its answers.
        for ticket in {id(t): t for t, _ in self._tickets.values()}.values():
            ticket.fail(error)

    def _deliver(self, outputs: list[tuple[int, Output]]) -> None:
        for number, output in outputs:
            ticket, index = self._tickets.get(number, (None, 0))
            # Cancelled since: its tokens were under way.
            if ticket is None:
                continue
            self.waiting.pop(number, None)
            if output.finished is not None:
                del self._tickets[number]
            if output.finished in (Finish.ERROR, Finish.CANCELLED):
                # Only to the log: the exception's text may contain another request's text.
                if output.handle.error is not None:
                    log.error("an answer failed: %s", describe(output.handle.error))
                ticket.fail(Refusal(500, "this answer failed; see the server's log"))
            else:
                ticket.events.put_nowait((index, output))

    def _on_refused(self, number: int, error: Exception) -> None:
        ticket, _ = self._tickets.pop(number, (None, 0))
        self.waiting.pop(number, None)
        # Our own errors describe what is wrong with the request; others are the server's faults.
        if isinstance(error, DSError):
            refusal = Refusal(400, str(error))
        else:
            log.error("a request was not taken: %s", describe(error))
            refusal = Refusal(500, "this request was not taken; see the server's log")
        if ticket is not None:
            ticket.fail(refusal)

    def _on_broken(self) -> None:
        self.healthy = False
        self.fail_all(Refusal(500, "the model's process failed; see the server's log"))
        self._failed()

    # -- in the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        driver = Driver(
            self.generator, lambda number, error: self._call(self._on_refused, number, error)
        )
        try:
            while driver.obey(self._link(self._commands())):
                if outputs := driver.step():
                    self._call(self._deliver, outputs)
        # SystemExit too: without this thread no request is answered
        except BaseException as error:
            log.error("the generator failed: %s", describe(error))
            self._call(self._on_broken)

    def _commands(self) -> list[Command]:
        """The commands that came; waits for one where there is nothing else to do."""
        commands: list[Command] = []
        with contextlib.suppress(queue.Empty):
            # Idle: wait for a command, but not for ever, as other ranks wait in a collective that
            # has a timeout.
            if not self.generator.busy:
                commands.append(self._inbox.get(timeout=_IDLE))
            while True:
                commands.append(self._inbox.get_nowait())
        return commands

    def _call(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)


class Ticket:
    """The answers to one request, as they come."""

    def __init__(self, worker: Worker, numbers: list[int]) -> None:
        self._worker = worker
        self._numbers = numbers
        self._open = set(range(len(numbers)))
        self._failure: Exception | None = None
        self.events: asyncio.Queue[tuple[int, Output] | None] = asyncio.Queue()

    def fail(self, error: Exception) -> None:
        """Whoever iterates gets `error` next; the answers are cancelled."""
        # Cancelled at once: the consumer may never continue the iteration (a client that left).
        for number in self._numbers:
            self._worker.cancel(number)
        self._failure = self._failure or error
        self.events.put_nowait(None)

    def stop(self, index: int) -> None:
        """Answer `index` is complete as it is."""
        self._worker.cancel(self._numbers[index])
        self._open.discard(index)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Output]]:
        while self._open:
            event = await self.events.get()
            # Checked first: a failure makes the tokens before it worthless.
            if self._failure is not None:
                raise self._failure
            assert event is not None
            index, output = event
            if index in self._open:
                if output.finished is not None:
                    self._open.discard(index)
                yield event
