"""The state store ``nvme``: one file per storage, read ahead of use and written behind it.

[Note: a storage's way] `evict` takes the memory of a storage away as a buffer, starts to write it,
and returns. `fetch` starts a read into a new buffer, and `wait` makes that the memory of the
storage. A storage that is fetched while its buffer is still being written gets it back without a
read. What was not changed is not written again. With ``max_in_cpu`` the buffers of the first
storages stay in memory, and are neither written nor read.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from ds_state_stores import StateStore
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ds_core.errors import UsageError
from ds_nvme.aio import AsyncIO
from ds_nvme.engines import Transfer
from ds_nvme.files import DiskError, Opened, RunFolder, disk_error, open_file, padded
from ds_nvme.memory import Buffer, Pool
from ds_nvme.native import swapping
from ds_nvme.probe import choose, settings

if TYPE_CHECKING:
    from ds_core.context import Context

log = logging.getLogger("ds_nvme")


@dataclass(slots=True)
class Moved:
    """What a store has done. Bytes, and seconds in which the caller waited for the disk."""

    read: int = 0
    written: int = 0
    waited: float = 0.0


@dataclass(slots=True)
class _Rest:
    """A storage that the store manages.

    ref: to the storage; as long as there is one, no other storage has its address. nbytes: of the
    storage when it is in memory. path: its file. made: whether it exists. rests: whether it has the
    storage's values. kept: in memory, never written. wanted: fetched, and not waited for. sums:
    checksums of the file. buffer: its contents, while they are read, written, or kept in memory.
    transfer: what is under way between both.
    """

    ref: StorageWeakRef
    nbytes: int
    path: str
    made: bool = False
    rests: bool = False
    kept: bool = False
    wanted: bool = False
    sums: bytes = b""
    buffer: Buffer | None = None
    transfer: Transfer | None = field(default=None, repr=False)


class NvmeStore(StateStore):
    """Store ``nvme``. See [Note: a storage's way]. moved: counters."""

    resident = False

    def __init__(self, ctx: Context, options: Mapping[str, Any]) -> None:
        super().__init__(ctx, options)
        if not options.get("nvme_path"):
            raise UsageError(
                'nvme_path is missing: device "nvme" needs a folder on the NVMe device'
            )
        self._behind = bool(options.get("pipeline_write", True))
        self._in_flight = max(1, int(options.get("buffer_count", 4)))
        self._room = int(options.get("max_in_cpu", 0))
        self._claims = not options.get("fast_init", False)
        aio = _section(ctx)
        self.folder = RunFolder(options["nvme_path"], getattr(ctx, "rank", 0))
        self._engine = choose(self.folder.path, settings(aio), aio.engine)
        self._checks = aio.checksum is not False
        self._pool = Pool(self._accelerator.pin if self.pinned else lambda host: host, swapping())
        self._rests: dict[int, _Rest] = {}
        self._writing: deque[_Rest] = deque()
        self._made = 0
        self.moved = Moved()

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `StateStore`; memory that needs no copy when it is evicted."""
        return self._pool.tensor(numel, dtype)

    # -- the contract ------------------------------------------------------------------------------

    def fetch(self, tensors: Sequence[Tensor]) -> None:
        """See `StateStore`."""
        wanted = [
            self._rests.get(storage._cdata)
            for storage, _ in _storages(tensors)
            if storage.nbytes() == 0
        ]
        fresh = [rest for rest in wanted if rest is not None and not rest.wanted]
        for rest in fresh:
            rest.wanted = True  # what is still being written is not given up
        self._reap()
        for rest in fresh:
            if rest.buffer is None:
                try:
                    file = open_file(rest.path, write=False)
                except DiskError:
                    rest.wanted = False
                    raise
                self._move(rest, file, self._pool.take(rest.nbytes), write=False)

    def wait(self, tensors: Sequence[Tensor]) -> None:
        """See `StateStore`."""
        for storage, _ in _storages(tensors):
            if storage.nbytes():
                continue
            rest = self._rests.get(storage._cdata)
            if rest is None or not rest.wanted:
                raise UsageError(
                    "wait() for a tensor that was not fetched from this store; call fetch() first"
                )
            self._attach(storage, rest)

    def allocate(self, tensors: Sequence[Tensor]) -> None:
        """Give evicted tensors memory without reading them: all of it will be overwritten."""
        for storage, _ in _storages(tensors):
            if storage.nbytes() == 0 and (rest := self._rests.get(storage._cdata)) is not None:
                rest.buffer = rest.buffer or self._pool.take(rest.nbytes)
                self._attach(storage, rest)
                rest.rests = False

    def evict(self, tensors: Sequence[Tensor], *, changed: bool = True) -> None:
        """See `StateStore`."""
        self._reap()
        for storage, itemsize in _storages(tensors):
            rest = self._rests.get(storage._cdata)
            if storage.nbytes() == 0:
                if rest is not None and rest.wanted:
                    self._unfetch(rest)
                continue
            if rest is None or rest.nbytes != storage.nbytes():
                self._forget(rest)
                rest = self._rests[storage._cdata] = self._new(storage, itemsize)
            write = not rest.kept and (changed or not rest.rests)
            while write and len(self._writing) >= self._in_flight:
                self._finish(self._writing[0])
            # a full disk leaves the tensor as it is
            file = self._open_to_write(rest) if write else None
            rest.buffer = self._pool.detach(storage)
            if file is not None:
                rest.rests = False
                self._move(rest, file, rest.buffer, write=True)
                self._writing.append(rest)
            elif not rest.kept:
                self._give_back(rest)
        if not self._behind:
            self.flush()

    def discard(self, tensors: Sequence[Tensor]) -> None:
        """See `StateStore`."""
        for storage, _ in _storages(tensors):
            self._forget(self._rests.pop(storage._cdata, None))

    # -- beyond it ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until all is written."""
        while self._writing:
            self._finish(self._writing[0])

    def close(self) -> None:
        """Give up all that is evicted, and remove the files. May be called again."""
        for rest in list(self._rests.values()):
            self._forget(rest)
        self._rests.clear()
        self._engine.close()
        self.folder.close()

    # -- one storage -------------------------------------------------------------------------------

    def _new(self, storage: torch.UntypedStorage, itemsize: int) -> _Rest:
        """Begin to manage a storage, which is in memory; the first ones are kept there."""
        self._made += 1
        if self._made % 256 == 0:
            for key in [k for k, r in self._rests.items() if r.ref.expired()]:
                self._forget(self._rests.pop(key))
        rest = _Rest(
            StorageWeakRef(storage),
            storage.nbytes(),
            str(self.folder.path / f"{self._made:06d}.bin"),
        )
        if rest.nbytes <= self._room * itemsize:
            self._room -= rest.nbytes // itemsize
            rest.kept = True
        return rest

    def _open_to_write(self, rest: _Rest) -> Opened:
        """The file of a storage.

        When it is new its space is set aside: a full disk is an error now, not in a step.
        """
        file = open_file(rest.path, write=True, create=not rest.made)
        nbytes = padded(rest.nbytes)
        if not rest.made:
            try:
                if self._claims:
                    os.posix_fallocate(file.descriptor, 0, nbytes)
                else:
                    os.ftruncate(file.descriptor, nbytes)
            except OSError as error:
                os.unlink(rest.path)
                at = f"({nbytes:,} bytes; {self.folder.free():,} are free)"
                raise disk_error("create", rest.path, error.errno or 0, at) from error
            rest.made = True
        return file

    def _move(self, rest: _Rest, file: Opened, buffer: Buffer, *, write: bool) -> None:
        """Start a transfer between a storage's file and a buffer."""
        nbytes = padded(rest.nbytes)
        sums = None if not self._checks else b"" if write else rest.sums
        rest.buffer = buffer
        rest.transfer = self._engine.start(
            file, write=write, offset=0, address=buffer.address, nbytes=nbytes, sums=sums
        )
        if write:
            self.moved.written += nbytes
        else:
            self.moved.read += nbytes

    def _settle(self, rest: _Rest) -> None:
        """Wait for what is under way."""
        if rest.transfer is None:
            return
        before = time.perf_counter()
        rest.transfer.wait()
        self.moved.waited += time.perf_counter() - before
        if rest.transfer.write:
            rest.rests = True
            rest.sums = rest.transfer.sums()
            self._writing.remove(rest)
        rest.transfer = None

    def _finish(self, rest: _Rest) -> None:
        """Wait for a write, and free its buffer, unless it was fetched meanwhile."""
        self._settle(rest)
        if not rest.wanted:
            self._give_back(rest)

    def _reap(self) -> None:
        """Free the buffers that are written."""
        while (
            self._writing
            and (transfer := self._writing[0].transfer) is not None
            and transfer.done()
        ):
            self._finish(self._writing[0])

    def _attach(self, storage: torch.UntypedStorage, rest: _Rest) -> None:
        self._settle(rest)
        buffer, rest.buffer, rest.wanted = rest.buffer, None, False
        assert buffer is not None
        self._pool.attach(storage, buffer, rest.nbytes)

    def _unfetch(self, rest: _Rest) -> None:
        """A fetched storage is evicted before anybody has waited for it."""
        rest.wanted = False
        if not rest.kept and (rest.transfer is None or not rest.transfer.write):
            self._settle(rest)
            self._give_back(rest)

    def _give_back(self, rest: _Rest) -> None:
        buffer, rest.buffer = rest.buffer, None
        if buffer is not None:
            self._pool.give_back(buffer)

    def _forget(self, rest: _Rest | None) -> None:
        """Remove what the store has of a storage."""
        if rest is None:
            return
        try:
            self._settle(rest)
        except DiskError as error:
            log.warning("%s (of a tensor that is used no more)", error)
            rest.transfer = None
            if rest in self._writing:
                self._writing.remove(rest)
        self._give_back(rest)
        if rest.made:
            with contextlib.suppress(OSError):
                os.unlink(rest.path)


def _section(ctx: Context) -> AsyncIO:
    config = getattr(ctx, "config", None)
    section = config.section(AsyncIO) if config is not None else None
    return section if section is not None else AsyncIO()


def _storages(tensors: Sequence[Tensor]) -> Iterator[tuple[torch.UntypedStorage, int]]:
    """The storages of tensors that have elements, and the bytes of an element."""
    for tensor in tensors:
        if tensor.numel():
            yield tensor.untyped_storage(), tensor.element_size()
