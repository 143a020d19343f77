"""The queue in which a group's long collectives run one after the other, its messages, and their
works.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ds_core import comm
from ds_core.errors import CommError

_TAG_EXCHANGE = 7
_Jobs = queue.SimpleQueue[tuple[Callable[[], None], bool, "Future[None]"] | None]


class Messages:
    """Sends and receives under way, as one work.

    [Note: polling] gloo's own works of point-to-point messages say that they are complete only
    after a wait. So the first question starts a thread that waits for them.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self._done: Future[None] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until all have been sent and received."""
        if self._done is None:
            self._wait_each(timeout)
        else:
            QueueWork(self._done).wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Whether all have been sent and received (or failed; wait tells)."""
        if not self._works:
            return True
        if self._done is None:
            self._done = Future()
            jobs: _Jobs = queue.SimpleQueue()
            jobs.put((lambda: self._wait_each(None), False, self._done))
            threading.Thread(
                target=_serve, args=(jobs, 1), name="ds_comm_gloo poll", daemon=True
            ).start()
        return self._done.done()

    def _wait_each(self, timeout: timedelta | None) -> None:
        for work in self._works:  # a second wait for the same message would never end
            work.wait() if timeout is None else work.wait(timeout)
        self._works = ()


class QueueWork:
    """A collective that runs in its group's queue."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the result is in its tensor. Raises what the collective raised."""
        try:
            self._future.result(None if timeout is None else timeout.total_seconds())
        except TimeoutError:
            raise CommError(f"a collective did not finish within {timeout}") from None
        return True

    def is_completed(self) -> bool:
        """Whether the collective has ended, well or not; wait tells which."""
        return self._future.done()


class GroupQueue:
    """The collectives of one group that take several messages, in the order of their calls; and
    those messages.

    Chunked collectives of one group run one after the other in the order in which they were called,
    on every rank; asynchronous ones on a thread of their own. It is a daemon, so a rank that fails
    can end while its peers hang.
    """

    def __init__(self, group: ProcessGroup) -> None:
        # the queue lives as long as its group, and must not keep it alive
        self._group = weakref.ref(group)
        self.size = group.size()
        self.rank = group.rank()
        self._jobs: _Jobs = queue.SimpleQueue()
        # The end of the last asynchronous collective, behind which a synchronous one runs.
        self._last: Future[None] | None = None
        self._started = False

    def run(self, job: Callable[[], None], async_op: bool, inference: bool) -> QueueWork | None:
        """Run `job` after all that was called before it; on the queue's thread if `async_op`."""
        if not async_op:
            if self._last is not None:
                self._last.exception()  # only its end matters here; its own wait() raises
                self._last = None
            # In the caller's thread: nothing is gained by another one.
            with torch.no_grad():
                job()
            return None
        if not self._started:
            threading.Thread(
                target=_serve, args=(self._jobs,), name="ds_comm_gloo queue", daemon=True
            ).start()
            # the thread ends with the queue, which ends with its group
            weakref.finalize(self, self._jobs.put, None)
            self._started = True
        self._last = future = Future[None]()
        self._jobs.put((job, inference, future))
        return QueueWork(future)

    @property
    def group(self) -> ProcessGroup:
        """The group, which must not have been destroyed."""
        group = self._group()
        if group is None:
            raise CommError(
                "the process group was destroyed while a collective ran on it; wait for its work "
                "first"
            )
        return group

    def peers(self) -> list[int]:
        """The other ranks, each rank starting at its right neighbour, so that not all send to one
        at once.
        """
        return [(self.rank + d) % self.size for d in range(1, self.size)]

    @property
    def tagged(self) -> bool:
        """Whether messages of the collective that this thread starts need tags, which gloo's own do
        not have.
        """
        return comm.tag() is not None

    def tag(self, kind: int) -> int:
        """The tag of messages of one kind, in the collective that this thread starts."""
        number = comm.tag()
        return kind if number is None else 0x40000000 | number << 3 | kind & 7

    def send(self, tensor: Tensor, to: int, tag: int) -> Any:
        """Start sending a flat tensor; it must stay as it is until the work is done."""
        return self.group.send([tensor.view(torch.uint8)], to, tag)

    def recv(self, tensor: Tensor, source: int, tag: int) -> Any:
        """Start receiving into a flat tensor."""
        return self.group.recv([tensor.view(torch.uint8)], source, tag)

    def exchange(
        self,
        output: Tensor,
        input: Tensor,
        received: list[int] | None = None,
        sent: list[int] | None = None,
    ) -> Any:
        """Start an all_to_all of flat tensors; sizes in elements, equal when None."""
        if self.tagged:
            return self._exchange_tagged(output, input, received, sent)
        width = output.element_size()
        out_bytes = None if received is None else [n * width for n in received]
        in_bytes = None if sent is None else [n * width for n in sent]
        # As bytes, so that any dtype can go.
        raw = (output.view(torch.uint8), input.view(torch.uint8))
        return dist.all_to_all_single(*raw, out_bytes, in_bytes, group=self.group, async_op=True)

    def _exchange_tagged(
        self, output: Tensor, input: Tensor, received: list[int] | None, sent: list[int] | None
    ) -> Messages:
        """`exchange` by messages whose tag tells what they belong to."""
        tag = self.tag(_TAG_EXCHANGE)
        incoming = output.split(received if received is not None else output.numel() // self.size)
        outgoing = input.split(sent if sent is not None else input.numel() // self.size)
        works = [self.recv(incoming[i], i, tag) for i in self.peers() if incoming[i].numel()]
        works += [self.send(outgoing[i], i, tag) for i in self.peers() if outgoing[i].numel()]
        incoming[self.rank].copy_(outgoing[self.rank])
        return Messages(works)


def _serve(jobs: _Jobs, count: int = 0) -> None:
    """Do `count` jobs as they come (0: until None comes)."""
    for _ in itertools.count() if count == 0 else range(count):
        coming = jobs.get()
        if coming is None:
            return
        job, inference, future = coming
        del coming
        fault = None
        try:
            with torch.inference_mode(inference), torch.no_grad():  # both are per thread
                job()
        except BaseException as error:
            fault = error
        # its tensors must not live until the next job comes, nor after its caller knows that it is
        # done
        del job
        if fault is None:
            future.set_result(None)
        else:
            future.set_exception(fault)
        del future, fault
