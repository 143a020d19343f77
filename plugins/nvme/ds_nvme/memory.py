"""Page-aligned host memory that is used again, and how it becomes the memory of a tensor's storage.

All I/O is between files and buffers of the pool. A tensor's storage gives its memory up as a
buffer, and gets it back from one. Where `ds_nvme.native.swapping` can be built, a buffer simply
becomes the storage's memory, and is taken out of it again; else both are copies.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ds_core.errors import UsageError
from ds_nvme.files import ALIGNMENT, padded

if TYPE_CHECKING:
    from collections.abc import Callable

_HUGE = 2 << 20
_MADV_HUGEPAGE = 14


class Buffer:
    """Aligned bytes."""

    __slots__ = ("data",)

    def __init__(self, data: Tensor) -> None:
        # A multiple of ALIGNMENT of them.
        self.data = data

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.data.data_ptr()


class _Lease:
    """A buffer that is the memory of a storage. It goes back when torch gives that memory up."""

    __slots__ = ("buffer", "pool")

    def __init__(self, pool: Pool, buffer: Buffer) -> None:
        self.pool = pool
        self.buffer: Buffer | None = buffer

    def __del__(self) -> None:
        if self.buffer is not None:
            self.pool.give_back(self.buffer)

    def take(self) -> Buffer:
        """The buffer, which goes back no more."""
        buffer, self.buffer = self.buffer, None
        assert buffer is not None
        return buffer


class Pool:
    """Hands out buffers, and takes them back.

    pin: page-locks memory, or gives it back as it is.
    swap: the module that exchanges a storage's memory; None: memory is copied.
    held: bytes in all buffers.
    peak: of `used`, the bytes that were handed out at a time. Free buffers are kept as long as
        `held` stays below it.
    """

    def __init__(self, pin: Callable[[Tensor], Tensor], swap: Any = None) -> None:
        self._pin = pin
        self._swap = swap
        self._free: list[Buffer] = []
        self.held = self.used = self.peak = 0

    def take(self, nbytes: int) -> Buffer:
        """A buffer of `nbytes` or somewhat more."""
        nbytes = padded(nbytes)
        # Half as much again is less waste than a new allocation, with its page faults and pinning.
        fitting = [b for b in self._free if nbytes <= b.data.numel() <= nbytes + nbytes // 2]
        if fitting:
            buffer = min(fitting, key=lambda b: b.data.numel())
            self._free.remove(buffer)
        else:
            # None fits: the oldest free buffers go until a new one does not raise the peak.
            while self._free and self.held + nbytes > max(self.peak, self.used + nbytes):
                self.held -= self._free.pop(0).data.numel()
            buffer = self._new(nbytes)
            self.held += nbytes
        self.used += buffer.data.numel()
        self.peak = max(self.peak, self.used)
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """Its memory may be handed out again."""
        self.used -= buffer.data.numel()
        self._free.append(buffer)

    def _new(self, nbytes: int) -> Buffer:
        return Buffer(aligned(nbytes, self._pin))

    # -- storages ----------------------------------------------------------------------------------

    @torch.no_grad()
    def detach(self, storage: torch.UntypedStorage) -> Buffer:
        """Take the contents of a storage, which is empty then."""
        nbytes = storage.nbytes()
        try:
            if self._swap is not None and isinstance(
                lease := self._swap.owner(storage._cdata), _Lease
            ):
                # The memory is a buffer of this pool already: it is taken out, without a copy.
                if lease.pool is self:
                    self._swap.take(storage._cdata)
                    return lease.take()
            buffer = self.take(nbytes)
            try:
                buffer.data[:nbytes].copy_(bytes_of(storage))
                # The end of a block goes to the disk as well, and into its checksum.
                buffer.data[nbytes : padded(nbytes)].zero_()
                storage.resize_(0)
            except RuntimeError:
                self.give_back(buffer)
                raise
        except (RuntimeError, ValueError) as error:
            raise UsageError(
                f"the memory of a tensor of {nbytes} bytes cannot be freed: {error} (torch refuses "
                "that for memory "
                "that was shared with numpy); offload a copy of it"
            ) from error
        return buffer

    @torch.no_grad()
    def attach(self, storage: torch.UntypedStorage, buffer: Buffer, nbytes: int) -> None:
        """Make the first `nbytes` of a buffer the contents of a storage, which is empty; the buffer
        is given up.
        """
        if self._swap is not None:
            # The lease gives the buffer back when torch frees the storage.
            self._swap.put(storage._cdata, buffer.address, nbytes, _Lease(self, buffer))
            return
        storage.resize_(nbytes)
        bytes_of(storage).copy_(buffer.data[:nbytes])
        self.give_back(buffer)

    @torch.no_grad()
    def tensor(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor, uninitialized; in the pool's memory where that is possible."""
        nbytes = numel * dtype.itemsize
        if self._swap is None or nbytes == 0:
            return self._pin(torch.empty(numel, dtype=dtype))
        made: Tensor = torch.empty(0, dtype=dtype)
        buffer = self.take(nbytes)
        buffer.data[nbytes:].zero_()
        self.attach(made.untyped_storage(), buffer, nbytes)
        return made.set_(made.untyped_storage(), 0, (numel,), (1,))


def aligned(nbytes: int, pin: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Uninitialized bytes at a multiple of ALIGNMENT; `pin` page-locks them, or gives them back as
    they are.

    Large ones are in huge pages where the kernel has them to give: a disk takes a block in one
    piece then, and not in one for each 4 KiB, of which it takes a limited number at a time (writing
    gains a quarter, reading a third).
    """
    step = _HUGE if nbytes >= _HUGE else ALIGNMENT
    # torch aligns to 64 bytes: there is room to begin later.
    room: Tensor = torch.empty(nbytes + step, dtype=torch.uint8)
    room = room if pin is None else pin(room)
    skip = -room.data_ptr() % step
    found = room[skip : skip + nbytes]
    # the other pages are allocated one by one, as they are used
    if step == _HUGE and (advise := _madvise()) is not None:
        advise(
            ctypes.c_void_p(found.data_ptr()),
            ctypes.c_size_t(nbytes - nbytes % _HUGE),
            _MADV_HUGEPAGE,
        )
    return found


@functools.cache
def _madvise() -> Callable[..., int] | None:
    return ctypes.CDLL(None).madvise if sys.platform == "linux" else None


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)
