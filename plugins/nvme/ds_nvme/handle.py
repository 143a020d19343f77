"""`aio_handle`: asynchronous reads and writes of tensors, with the signatures of DeepSpeed's.

[Note: what is not aligned] Direct I/O moves multiples of 4096 bytes between memory and a file at
multiples of 4096. So the last bytes of a tensor go through the page cache, and so does all of it
where the offset in the file is no multiple. A tensor that lies elsewhere than at a multiple, has
gaps or is on a device is copied through aligned memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_core.accelerator import get_accelerator
from ds_core.errors import DSError, UsageError
from ds_core.process import log_once
from ds_nvme.engines import Engine, Settings, Transfer
from ds_nvme.files import ALIGNMENT, DiskError, Opened, open_file
from ds_nvme.memory import aligned
from ds_nvme.native import available
from ds_nvme.probe import ENGINES, open_engine

log = logging.getLogger("ds_nvme")


@dataclass(slots=True)
class _Operation:
    """One read or write of a tensor."""

    tensor: Tensor
    # What the engine moves; not the tensor's own where that is copied.
    memory: Tensor
    write: bool
    path: str
    offset: int
    # Compare the file with the memory afterwards.
    validate: bool
    transfers: list[Transfer] = field(default_factory=list)

    def finish(self) -> None:
        """Wait for all of it. Raises DiskError."""
        # All are waited for, also behind an error: their memory must not be freed before.
        errors: list[DiskError] = []
        for transfer in self.transfers:
            try:
                transfer.wait()
            except DiskError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        # A read that went through aligned memory: now into the tensor.
        if not self.write and self.memory.data_ptr() != self.tensor.data_ptr():
            self.tensor.copy_(self.memory.view(self.tensor.dtype).view(self.tensor.shape))
        if self.validate:
            self._compare()

    def _compare(self) -> None:
        with Path(self.path).open("rb") as file:
            file.seek(self.offset)
            found = file.read(self.memory.numel())
        wanted = bytearray(self.memory.numel())
        ctypes.memmove(
            (ctypes.c_char * len(wanted)).from_buffer(wanted), self.memory.data_ptr(), len(wanted)
        )
        if found != wanted:
            raise DiskError(
                f"{self.path} has other contents at {self.offset} than the tensor", self.path
            )


class aio_handle:
    """Reads and writes tensors; `wait` ends what was started asynchronously.

    Errors are raised, as DiskError.

    block_size: bytes per request.
    queue_depth: requests under way, of each thread.
    single_submit: one request per system call.
    overlap_events: begin a request as soon as another one is done, not when all are.
    intra_op_parallelism: threads.
    """

    def __init__(
        self,
        block_size: int = 1024 * 1024,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        if block_size <= 0 or block_size % ALIGNMENT:
            raise UsageError(f"block_size {block_size}: must be a multiple of {ALIGNMENT}")
        if queue_depth < 1 or intra_op_parallelism < 1:
            raise UsageError("queue_depth and intra_op_parallelism must be at least 1")
        self._settings = Settings(
            block_size, queue_depth, intra_op_parallelism, single_submit, overlap_events
        )
        self._engine = _first_engine(self._settings)
        self._pending: list[_Operation] = []
        self._locked: dict[int, Tensor] = {}

    # -- settings ----------------------------------------------------------------------------------

    def get_block_size(self) -> int:
        """Bytes per request."""
        return self._settings.block_size

    def get_queue_depth(self) -> int:
        """Requests under way."""
        return self._settings.queue_depth

    def get_single_submit(self) -> bool:
        """Whether each request has a system call of its own."""
        return self._settings.single_submit

    def get_overlap_events(self) -> bool:
        """Whether requests begin before earlier ones are done."""
        return self._settings.overlap_events

    def get_intra_op_parallelism(self) -> int:
        """The number of threads."""
        return self._settings.threads

    def get_alignment(self) -> int:
        """Tensors whose size is a multiple of it move fastest; any size works."""
        return self._settings.threads * ALIGNMENT

    # -- reads and writes --------------------------------------------------------------------------

    def read(self, buffer: Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Fill a tensor from a file, and wait; 0."""
        self._start(buffer, filename, False, validate, file_offset).finish()
        return 0

    def write(self, buffer: Tensor, filename: str, validate: bool, file_offset: int = 0) -> int:
        """Write a tensor to a file, and wait; 0."""
        self._start(buffer, filename, True, validate, file_offset).finish()
        return 0

    def pread(
        self, buffer: Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0
    ) -> int:
        """Fill a tensor from a file: the number of operations done; asynchronously: 0."""
        return self._operate(buffer, filename, False, validate, async_, file_offset)

    def pwrite(
        self, buffer: Tensor, filename: str, validate: bool, async_: bool, file_offset: int = 0
    ) -> int:
        """Write a tensor to a file: the number of operations done; asynchronously: 0."""
        return self._operate(buffer, filename, True, validate, async_, file_offset)

    def sync_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Fill a tensor from a file, and wait for all operations: their number."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Write a tensor to a file, and wait for all operations: their number."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def async_pread(self, buffer: Tensor, filename: str, file_offset: int = 0) -> int:
        """Start to fill a tensor from a file; 0. The tensor must not be used before `wait`."""
        return self.pread(buffer, filename, False, True, file_offset)

    def async_pwrite(self, buffer: Tensor, filename: str | int, file_offset: int = 0) -> int:
        """Start to write a tensor to a file, or to an open one by its number; 0.

        It must not change before `wait`.
        """
        return self._operate(buffer, filename, True, False, True, file_offset)

    def wait(self) -> int:
        """Wait for all that was started; the number of operations. Raises the first DiskError."""
        pending, self._pending = self._pending, []
        errors: list[DiskError] = []
        for operation in pending:
            try:
                operation.finish()
            except DiskError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return len(pending)

    # -- memory ------------------------------------------------------------------------------------

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: Tensor) -> Tensor:
        """A tensor of zeros in aligned, page-locked host memory, with the dtype of
        `example_tensor`.
        """
        host = aligned(num_elem * example_tensor.element_size(), get_accelerator().pin)
        if host.numel() and not host.is_pinned():
            _lock(host)
        made = host.zero_().view(example_tensor.dtype)
        self._locked[made.data_ptr()] = made
        return made

    def free_cpu_locked_tensor(self, tensor: Tensor) -> bool:
        """Give the memory of `new_cpu_locked_tensor` up; False for another tensor."""
        return self._locked.pop(tensor.data_ptr(), None) is not None

    # -- one operation -----------------------------------------------------------------------------

    def _operate(
        self,
        tensor: Tensor,
        filename: str | int,
        write: bool,
        validate: bool,
        asynchronous: bool,
        offset: int,
    ) -> int:
        self._pending.append(self._start(tensor, filename, write, validate, offset))
        return 0 if asynchronous else self.wait()

    @torch.no_grad()
    def _start(
        self, tensor: Tensor, filename: str | int, write: bool, validate: bool, offset: int
    ) -> _Operation:
        if offset < 0:
            raise UsageError(f"file_offset {offset}: must not be negative")
        operation = _Operation(
            tensor, _memory_for(tensor, write), write, str(filename), offset, validate
        )
        nbytes = operation.memory.numel()
        address = operation.memory.data_ptr()
        if not write:
            _check_size(str(filename), offset, nbytes)
        # Whole blocks by direct I/O, the rest through the page cache; see [Note: what is not
        # aligned].
        main = nbytes // ALIGNMENT * ALIGNMENT if offset % ALIGNMENT == 0 else 0
        for begin, size, direct in ((0, main, True), (main, nbytes - main, False)):
            if size:
                file = _open(filename, write, direct)
                operation.transfers.append(
                    self._engine.start(
                        file,
                        write=write,
                        offset=offset + begin,
                        address=address + begin,
                        nbytes=size,
                    )
                )
        return operation


def aio_read(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """`aio_handle.read` of a handle with these settings."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).read(
        buffer, filename, validate
    )


def aio_write(
    buffer: Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    """`aio_handle.write` of a handle with these settings."""
    return aio_handle(block_size, queue_depth, single_submit, overlap_events).write(
        buffer, filename, validate
    )


class AsyncIOBuilder:
    """DeepSpeed's builder of this module."""

    NAME = "async_io"

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME

    def absolute_name(self) -> str:
        """The name with its package."""
        return f"deepspeed.ops.aio.{self.name}_op"

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the engines in C++ can be built here. Without them `load` works, by threads."""
        return available() is None

    def load(self, verbose: bool = True) -> Any:
        """This module, which has `aio_handle`."""
        return sys.modules[__name__]

    jit_load = load

    def builder(self) -> AsyncIOBuilder:
        """This."""
        return self


def _first_engine(wanted: Settings) -> Engine:
    """The best engine that there is here. No folder is known yet to try it in."""
    reasons = []
    for name in ENGINES:
        try:
            return open_engine(name, wanted)
        except (DSError, RuntimeError) as error:
            reasons.append(f"{name}: {error}")
    raise UsageError(f"no engine: {'; '.join(reasons)}")


def _memory_for(tensor: Tensor, write: bool) -> Tensor:
    """The bytes of a tensor that can be moved, or a copy; for a read, room for it."""
    on_host = tensor.device.type == "cpu"
    if (
        on_host
        and tensor.is_contiguous()
        # Less than a block never goes by direct I/O, so its address does not matter.
        and (tensor.data_ptr() % ALIGNMENT == 0 or tensor.nbytes < ALIGNMENT)
    ):
        return tensor.detach().reshape(-1).view(torch.uint8)
    copy = aligned(tensor.nbytes)
    if write:
        copy.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return copy


def _check_size(path: str, offset: int, nbytes: int) -> None:
    try:
        size = os.stat(path).st_size
    except OSError:
        return  # opening it says why
    if offset + nbytes > size:
        raise DiskError(
            f"{path} has {size} bytes, and {nbytes} at {offset} are to be read; it was cut off",
            path,
        )


def _open(filename: str | int, write: bool, direct: bool) -> Opened:
    if isinstance(filename, str | os.PathLike):
        return open_file(filename, write=write, direct=direct, create=write)
    # The transfer closes what it was given, and the caller's descriptor stays open.
    descriptor = os.dup(filename)
    return Opened(
        f"file {filename}", descriptor, bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
    )


def _lock(host: Tensor) -> None:
    """Keep memory from being swapped out, where this user may."""
    with contextlib.suppress(AttributeError, OSError):
        if ctypes.CDLL(None).mlock(ctypes.c_void_p(host.data_ptr()), ctypes.c_size_t(host.numel())):
            log_once(log, logging.WARNING, "memory for I/O is not locked: `ulimit -l` is too low")
