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
class _Stored:
    """A storage that the store manages."""

    # To the storage: as long as there is one, no other storage has its address.
    ref: StorageWeakRef
    # The size of the storage when it is in memory.
    nbytes: int
    # Its file.
    path: str
    # Whether the file exists.
    made: bool = False
    # Whether the file has the storage's values.
    on_disk: bool = False
    # In memory, never written (`max_in_cpu`).
    kept: bool = False
    # Fetched, and not waited for.
    wanted: bool = False
    # Checksums of the file.
    sums: bytes = b""
    # Its contents, while they are read, written, or kept in memory.
    buffer: Buffer | None = None
    # What is under way between buffer and file.
    transfer: Transfer | None = field(default=None, repr=False)


class NvmeStore(StateStore):
    """Store ``nvme``. See [Note: a storage's way]."""

    resident = False

    def __init__(self, ctx: Context, options: Mapping[str, Any]) -> None:
        super().__init__(ctx, options)
        if not options.get("nvme_path"):
            raise UsageError(
                'nvme_path is missing: device "nvme" needs a folder on the NVMe device'
            )
        # Options of `offload_optimizer` and `offload_param`.
        self._behind = bool(options.get("pipeline_write", True))
        self._in_flight = max(1, int(options.get("buffer_count", 4)))
        self._room = int(options.get("max_in_cpu", 0))
        # Whether a new file's space is set aside.
        self._claims = not options.get("fast_init", False)
        aio = _section(ctx)
        self.folder = RunFolder(options["nvme_path"], getattr(ctx, "rank", 0))
        self._engine = choose(self.folder.path, settings(aio), aio.engine)
        self._checks = aio.checksum is not False
        self._pool = Pool(self._accelerator.pin if self.pinned else lambda host: host, swapping())
        self._stored: dict[int, _Stored] = {}
        # In the order in which they were started, the oldest first.
        self._writing: deque[_Stored] = deque()
        # Files that were made, for their names; counters for who measures.
        self._made = 0
        self.moved = Moved()

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """See `StateStore`; memory that needs no copy when it is evicted."""
        return self._pool.tensor(numel, dtype)

    # -- the contract ------------------------------------------------------------------------------

    def fetch(self, tensors: Sequence[Tensor]) -> None:
        """See `StateStore`."""
        wanted = [
            self._stored.get(storage._cdata)
            for storage, _ in _storages(tensors)
            if storage.nbytes() == 0
        ]
        fresh = [stored for stored in wanted if stored is not None and not stored.wanted]
        for stored in fresh:
            stored.wanted = True  # what is still being written is not given up
        # Buffers of finished writes are free for the reads.
        self._reap()
        for stored in fresh:
            if stored.buffer is None:
                try:
                    file = open_file(stored.path, write=False)
                except DiskError:
                    stored.wanted = False
                    raise
                self._move(stored, file, self._pool.take(stored.nbytes), write=False)

    def wait(self, tensors: Sequence[Tensor]) -> None:
        """See `StateStore`."""
        for storage, _ in _storages(tensors):
            # In memory: kept, or waited for before.
            if storage.nbytes():
                continue
            stored = self._stored.get(storage._cdata)
            if stored is None or not stored.wanted:
                raise UsageError(
                    "wait() for a tensor that was not fetched from this store; call fetch() first"
                )
            self._attach(storage, stored)

    def allocate(self, tensors: Sequence[Tensor]) -> None:
        """Give evicted tensors memory without reading them: all of it will be overwritten."""
        for storage, _ in _storages(tensors):
            if storage.nbytes() == 0 and (stored := self._stored.get(storage._cdata)) is not None:
                stored.buffer = stored.buffer or self._pool.take(stored.nbytes)
                self._attach(storage, stored)
                stored.on_disk = False

    def evict(self, tensors: Sequence[Tensor], *, changed: bool = True) -> None:
        """See `StateStore`."""
        self._reap()
        for storage, itemsize in _storages(tensors):
            stored = self._stored.get(storage._cdata)
            if storage.nbytes() == 0:
                if stored is not None and stored.wanted:
                    # Evicted already, and fetched: the read is given up.
                    self._unfetch(stored)
                continue
            # Not seen before, or another storage by now: it was resized.
            if stored is None or stored.nbytes != storage.nbytes():
                self._forget(stored)
                stored = self._stored[storage._cdata] = self._new(storage, itemsize)
            write = not stored.kept and (changed or not stored.on_disk)
            # Each write has a buffer, so their number bounds the memory.
            while write and len(self._writing) >= self._in_flight:
                self._finish(self._writing[0])
            # a full disk leaves the tensor as it is
            file = self._open_to_write(stored) if write else None
            stored.buffer = self._pool.detach(storage)
            if file is not None:
                stored.on_disk = False
                self._move(stored, file, stored.buffer, write=True)
                self._writing.append(stored)
            # The file has these very values: nothing to write.
            elif not stored.kept:
                self._give_back(stored)
        if not self._behind:
            self.flush()

    def discard(self, tensors: Sequence[Tensor]) -> None:
        """See `StateStore`."""
        for storage, _ in _storages(tensors):
            self._forget(self._stored.pop(storage._cdata, None))

    # -- beyond it ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Wait until all is written."""
        while self._writing:
            self._finish(self._writing[0])

    def close(self) -> None:
        """Give up all that is evicted, and remove the files. May be called again."""
        for stored in list(self._stored.values()):
            self._forget(stored)
        self._stored.clear()
        self._engine.close()
        self.folder.close()

    # -- one storage -------------------------------------------------------------------------------

    def _new(self, storage: torch.UntypedStorage, itemsize: int) -> _Stored:
        """Begin to manage a storage, which is in memory; the first ones are kept there."""
        self._made += 1
        # Storages that were freed by torch without `discard`: looked for now and then.
        if self._made % 256 == 0:
            for key in [k for k, r in self._stored.items() if r.ref.expired()]:
                self._forget(self._stored.pop(key))
        stored = _Stored(
            StorageWeakRef(storage),
            storage.nbytes(),
            str(self.folder.path / f"{self._made:06d}.bin"),
        )
        if stored.nbytes <= self._room * itemsize:
            self._room -= stored.nbytes // itemsize
            stored.kept = True
        return stored

    def _open_to_write(self, stored: _Stored) -> Opened:
        """The file of a storage.

        When it is new its space is set aside: a full disk is an error now, not in a step.
        """
        file = open_file(stored.path, write=True, create=not stored.made)
        nbytes = padded(stored.nbytes)
        if not stored.made:
            try:
                if self._claims:
                    os.posix_fallocate(file.descriptor, 0, nbytes)
                else:
                    os.ftruncate(file.descriptor, nbytes)
            except OSError as error:
                os.unlink(stored.path)
                at = f"({nbytes:,} bytes; {self.folder.free():,} are free)"
                raise disk_error("create", stored.path, error.errno or 0, at) from error
            stored.made = True
        return file

    def _move(self, stored: _Stored, file: Opened, buffer: Buffer, *, write: bool) -> None:
        """Start a transfer between a storage's file and a buffer."""
        nbytes = padded(stored.nbytes)
        sums = None if not self._checks else b"" if write else stored.sums
        stored.buffer = buffer
        stored.transfer = self._engine.start(
            file, write=write, offset=0, address=buffer.address, nbytes=nbytes, sums=sums
        )
        if write:
            self.moved.written += nbytes
        else:
            self.moved.read += nbytes

    def _settle(self, stored: _Stored) -> None:
        """Wait for what is under way."""
        if stored.transfer is None:
            return
        # Only waiting counts: what was done in time costs the step nothing.
        before = time.perf_counter()
        stored.transfer.wait()
        self.moved.waited += time.perf_counter() - before
        if stored.transfer.write:
            stored.on_disk = True
            stored.sums = stored.transfer.sums()
            self._writing.remove(stored)
        stored.transfer = None

    def _finish(self, stored: _Stored) -> None:
        """Wait for a write, and free its buffer, unless it was fetched meanwhile."""
        self._settle(stored)
        if not stored.wanted:
            self._give_back(stored)

    def _reap(self) -> None:
        """Free the buffers that are written."""
        while (
            self._writing
            and (transfer := self._writing[0].transfer) is not None
            and transfer.done()
        ):
            self._finish(self._writing[0])

    def _attach(self, storage: torch.UntypedStorage, stored: _Stored) -> None:
        self._settle(stored)
        buffer, stored.buffer, stored.wanted = stored.buffer, None, False
        assert buffer is not None
        self._pool.attach(storage, buffer, stored.nbytes)

    def _unfetch(self, stored: _Stored) -> None:
        """A fetched storage is evicted before anybody has waited for it."""
        stored.wanted = False
        if not stored.kept and (stored.transfer is None or not stored.transfer.write):
            self._settle(stored)
            self._give_back(stored)

    def _give_back(self, stored: _Stored) -> None:
        buffer, stored.buffer = stored.buffer, None
        if buffer is not None:
            self._pool.give_back(buffer)

    def _forget(self, stored: _Stored | None) -> None:
        """Remove what the store has of a storage."""
        if stored is None:
            return
        try:
            self._settle(stored)
        # The values are no longer needed, so the run continues.
        except DiskError as error:
            log.warning("%s (of a tensor that is used no more)", error)
            stored.transfer = None
            if stored in self._writing:
                self._writing.remove(stored)
        self._give_back(stored)
        if stored.made:
            with contextlib.suppress(OSError):
                os.unlink(stored.path)


def _section(ctx: Context) -> AsyncIO:
    config = getattr(ctx, "config", None)
    section = config.section(AsyncIO) if config is not None else None
    return section if section is not None else AsyncIO()


def _storages(tensors: Sequence[Tensor]) -> Iterator[tuple[torch.UntypedStorage, int]]:
    """The storages of tensors that have elements, and the bytes of an element."""
    for tensor in tensors:
        if tensor.numel():
            yield tensor.untyped_storage(), tensor.element_size()
