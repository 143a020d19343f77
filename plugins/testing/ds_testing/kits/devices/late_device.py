"""A device for tests whose side streams run as late as events allow: what is not waited for is
stale.

Its tensors are the CPU's, so code under test must be told to treat those as a device's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ds_core.accelerator import CpuAccelerator


class Stream:
    """Jobs that run when somebody waits for them."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []
        self.done = 0

    def run(self, count: int) -> None:
        """Do the first `count` jobs that are not done yet."""
        while self.done < count:
            job, self.jobs[self.done] = self.jobs[self.done], lambda: None
            self.done += 1
            job()

    def wait_stream(self, other: Stream) -> None:
        """Jobs given from here on begin after those that `other` has now."""
        count = len(other.jobs)
        self.jobs.append(lambda: other.run(count))


class Event:
    """A point in the jobs of a stream."""

    def __init__(self, device: LateDevice) -> None:
        self.device = device

    def record(self) -> None:
        """Mark where the current stream stands."""
        self.count = len(self.device.now.jobs)
        self.stream = self.device.now

    def wait(self) -> None:
        """The current stream waits for the marked point."""
        stream = self.stream
        count = self.count
        if self.device.now is self.device.main:
            stream.run(count)  # what the program does next sees it
        else:
            self.device.now.jobs.append(lambda: stream.run(count))

    def query(self) -> bool:
        """Whether the stream has passed the marked point."""
        return self.stream.done >= self.count


class LateDevice(CpuAccelerator):
    """Work of the main stream is done at once, that of others as late as possible."""

    def __init__(self) -> None:
        self.main = self.now = Stream()

    def new_stream(self) -> Stream:
        """One that is late."""
        return Stream()

    def current_stream(self) -> Stream:
        """The main one, or that of the innermost `stream`."""
        return self.now

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        """Inside, copies are queued on `stream`."""
        before, self.now = self.now, stream
        with Late(self):
            yield
        self.now = before

    def new_event(self, timing: bool = False) -> Event:
        """One that orders late work."""
        return Event(self)


class Late(torch.utils._python_dispatch.TorchDispatchMode):
    """Puts each operation of torch into the current stream, to be done later."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        self.device.now.jobs.append(lambda: func(*args))
        return args[0]
