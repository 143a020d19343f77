"""Copies of device tensors in host memory, made beside the device's other work: for activations
that wait for backward.

[Note: order of copies] Copies to the host run on one side stream and copies back on another. Each
waits for what was queued on the caller's stream before it, so that the memory it reads or writes is
in no other use. A tensor that leaves is held until its copy is done; the caller's stream then waits
for the copy, and its memory may be used again.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from ds_core.process import log_once

if TYPE_CHECKING:
    from torch import Tensor

    from ds_core.accelerator import Accelerator

log = logging.getLogger("ds_state_stores")


class _Buffer:
    """Host memory.

    busy: the event after which it may be written; None: now.
    """

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.busy: Any = None


class HostCopy:
    """The copy of one tensor. Its host memory is used again when the last reference to it is gone.

    shape, stride: of the tensor that `HostCopies.back` gives.
    nbytes: of host memory; 0 where nothing was copied.
    """

    def __init__(self, owner: HostCopies, tensor: Tensor) -> None:
        dense = tensor.is_contiguous() or (tensor.numel() > 0 and _is_dense(tensor))
        self.shape = tensor.shape
        self.stride = (
            tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
        )
        self.dtype = tensor.dtype
        self.device = tensor.device
        self._owner = owner
        self._host: _Buffer | None = None
        self._made: Any = None  # the event after which the host has it
        self._back: Tensor | None = None
        self._loaded: Any = None  # the event after which `_back` is filled

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return 0 if self._host is None else self.shape.numel() * self.dtype.itemsize

    def _on_host(self) -> Tensor:
        assert self._host is not None
        flat = self._host.data[: self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)

    def __del__(self) -> None:
        if self._host is not None:
            if self._back is not None:  # copied back, and never used
                self._loaded.wait()
            self._owner._give_back(self)


class HostCopies:
    """Makes and reads back copies, in pinned memory that is used again.

    pin_memory: page-locked host memory; without it, a device waits for each copy.
    in_flight: how many tensors may be on their way to the host at once: so many stay on the device
        longer. On a device whose memory is the host's, nothing is copied.
    held: bytes of host memory now.
    peak: the maximum of `held`.
    moved: bytes copied to the host.
    """

    def __init__(
        self, accelerator: Accelerator, *, pin_memory: bool = True, in_flight: int = 2
    ) -> None:
        self._accelerator = accelerator
        self._pin = pin_memory
        self._in_flight = max(1, in_flight)
        self._out = accelerator.new_stream()
        self._in = accelerator.new_stream()
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        self._free: list[_Buffer] = []
        self.held = self.peak = self.used = self.moved = 0

    def stays(self, tensor: Tensor) -> bool:
        """Whether `out` copies nothing, since the tensor is in the host's memory."""
        return tensor.device.type == "cpu"

    @torch.no_grad()
    def out(self, tensor: Tensor) -> HostCopy:
        """Start to copy `tensor` to the host; the caller may drop it."""
        copy = HostCopy(self, tensor)
        if tensor.numel() == 0 or self.stays(tensor):
            copy._back = tensor.detach()
            if tensor.numel():
                log_once(
                    log,
                    logging.INFO,
                    "tensors of the host stay where they are: offloading them frees no memory",
                )
            return copy
        # The device's memory is used again when a copy is done. Too many on their way: the oldest
        # is waited for.
        while self._leaving and (
            len(self._leaving) >= self._in_flight or self._leaving[0][0].query()
        ):
            self._leaving.popleft()[0].wait()
        copy._host = buffer = self._take(tensor.numel() * tensor.itemsize)
        # The copy begins after the work that makes the tensor, and runs beside what follows.
        self._follow(self._out)
        with self._accelerator.stream(self._out):
            # Its last content may still be on its way to the device.
            if buffer.busy is not None:
                buffer.busy.wait()
            copy._on_host().copy_(tensor, non_blocking=self._pin)
            copy._made = buffer.busy = self._event()
        self._leaving.append((copy._made, tensor))
        self.moved += copy.nbytes
        return copy

    @torch.no_grad()
    def prefetch(self, copy: HostCopy) -> None:
        """Start to copy back; `back` then waits for less."""
        if copy._back is not None:
            return
        copy._back = torch.empty_strided(
            copy.shape, copy.stride, dtype=copy.dtype, device=copy.device
        )
        # The memory that was just given may still be in use by earlier work.
        self._follow(self._in)
        with self._accelerator.stream(self._in):
            copy._made.wait()
            copy._back.copy_(copy._on_host(), non_blocking=self._pin)
            copy._loaded = self._event()
        if copy._host is not None:
            copy._host.busy = copy._loaded

    def back(self, copy: HostCopy) -> Tensor:
        """The tensor, on its device. It may be asked for again, and is then copied again."""
        self.prefetch(copy)
        assert copy._back is not None
        if copy._host is None:
            return copy._back
        copy._loaded.wait()
        found, copy._back = copy._back, None
        return found

    def settle(self) -> None:
        """Forget tensors that were leaving: their memory may be used again when their copies are
        done.
        """
        while self._leaving:
            self._leaving.popleft()[0].wait()

    # -- events and buffers ------------------------------------------------------------------------

    def _follow(self, stream: Any) -> None:
        if stream is not None:
            stream.wait_stream(self._accelerator.current_stream())

    def _event(self) -> Any:
        event = self._accelerator.new_event()
        event.record()
        return event

    def _take(self, nbytes: int) -> _Buffer:
        """A buffer of at least `nbytes`, and at most twice as many where it was used before."""
        fitting = [b for b in self._free if nbytes <= b.data.numel() <= 2 * nbytes]
        if fitting:
            buffer = min(fitting, key=lambda b: b.data.numel())
            self._free.remove(buffer)
        else:
            # Free buffers of other sizes go first, so that the host's memory does not grow beyond
            # its peak.
            while self._free and self.held + nbytes > max(self.peak, self.used + nbytes):
                self.held -= self._free.pop(0).data.numel()
            host = torch.empty(nbytes, dtype=torch.uint8)
            buffer = _Buffer(self._accelerator.pin(host) if self._pin else host)
            self.held += nbytes
            self.peak = max(self.peak, self.held)
        self.used += buffer.data.numel()
        return buffer

    def _give_back(self, copy: HostCopy) -> None:
        buffer, copy._host = copy._host, None
        if buffer is not None:
            self.used -= buffer.data.numel()
            self._free.append(buffer)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill a block of memory, in any order of dimensions, so that it can be
    copied as it lies.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
