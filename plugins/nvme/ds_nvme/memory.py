"""Page-aligned host memory that is used again, and how it becomes the memory of a tensor's storage.

All I/O is between files and buffers of the pool. A tensor's storage gives its memory up to a buffer, and gets it back
from one: by a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ds_core.errors import UsageError
from ds_nvme.files import ALIGNMENT, padded

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Buffer", "Pool", "bytes_of"]


class Buffer:
    """data: aligned bytes, a multiple of ALIGNMENT of them."""

    __slots__ = ("_owner", "data")

    def __init__(self, data: Tensor, owner: Tensor) -> None:
        self.data, self._owner = data, owner

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.data.data_ptr()


class Pool:
    """Hands out buffers, and takes them back.

    pin: page-locks memory, or gives it back as it is. held: bytes in all buffers. peak: of `used`, the bytes that were
    handed out at a time; free buffers are kept as long as `held` stays below it.
    """

    def __init__(self, pin: Callable[[Tensor], Tensor]) -> None:
        self._pin = pin
        self._free: list[Buffer] = []
        self.held = self.used = self.peak = 0

    def take(self, nbytes: int) -> Buffer:
        """A buffer of `nbytes` or somewhat more."""
        nbytes = padded(nbytes)
        fitting = [b for b in self._free if nbytes <= b.data.numel() <= nbytes + nbytes // 4]
        if fitting:
            buffer = min(fitting, key=lambda b: b.data.numel())
            self._free.remove(buffer)
        else:
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
        owner = self._pin(torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8))
        skip = -owner.data_ptr() % ALIGNMENT
        return Buffer(owner[skip : skip + nbytes], owner)

    # -- storages --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def detach(self, storage: torch.UntypedStorage) -> Buffer:
        """Take the contents of a storage, which is empty then."""
        nbytes = storage.nbytes()
        buffer = self.take(nbytes)
        buffer.data[:nbytes].copy_(bytes_of(storage))
        try:
            storage.resize_(0)
        except RuntimeError as error:
            self.give_back(buffer)
            raise UsageError(
                f"the memory of a tensor of {nbytes} bytes cannot be freed: {error} (torch refuses that for memory "
                "that is shared with numpy or with other processes); offload a copy of it"
            ) from error
        return buffer

    @torch.no_grad()
    def attach(self, storage: torch.UntypedStorage, buffer: Buffer, nbytes: int) -> None:
        """Make the first `nbytes` of a buffer the contents of a storage, which is empty; the buffer is given up."""
        storage.resize_(nbytes)
        bytes_of(storage).copy_(buffer.data[:nbytes])
        self.give_back(buffer)


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8).set_(storage)
