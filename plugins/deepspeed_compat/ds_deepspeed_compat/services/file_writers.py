"""``deepspeed.io``: writers of files that programs give to ``torch.save``, with statistics of what
was written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_COUNTS = ("close", "fileno", "flush", "write", "bytes", "write_secs", "write_GB/s")
_SIZE = 8  # bytes of the size that is written before a storage
NO_DESCRIPTOR = -1


class BaseFileWriter:
    """What all writers have: the path, and counts of the calls, of bytes and of seconds."""

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        self._path = file_path
        self._stats: dict[str, Any] = dict.fromkeys(_COUNTS, 0)

    def file_path(self) -> str | os.PathLike[str]:
        """The file."""
        return self._path

    def write(self, buffer: Any) -> int:
        """Write bytes; how many they are."""
        began = time.perf_counter()
        written = self._write(buffer)
        self._stats["write_secs"] += time.perf_counter() - began
        self._stats["write"] += 1
        self._stats["bytes"] += written
        return written

    def _write(self, buffer: Any) -> int:
        return len(buffer)

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._stats["flush"] += 1

    def fileno(self) -> int:
        """-1, so that nobody writes past the writer."""
        self._stats["fileno"] += 1
        return NO_DESCRIPTOR

    def close(self) -> None:
        """Write what is left, and close the file; once is enough."""
        self._stats["close"] += 1

    def _dump_state(self) -> None:
        """Print the statistics."""
        if self._stats["write_secs"] > 0:
            self._stats["write_GB/s"] = self._stats["bytes"] / self._stats["write_secs"] / 1024**3
        self._stats["path"] = self.file_path()
        print(f"stats = {self._stats}")


class PyFileWriter(BaseFileWriter):
    """An ordinary file of Python's."""

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        super().__init__(file_path)
        self._file = Path(file_path).open("wb")  # noqa: SIM115  it lives as long as the writer

    def _write(self, buffer: Any) -> int:
        self._file.write(buffer)
        return len(buffer)

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        super().flush()
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        super().close()
        self._file.close()


class _Storages(BaseFileWriter):
    """Writes torch's storages too, as ``torch.save`` of programs that were made for it hands them
    over.
    """

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        super().__init__(file_path)
        self._stats["save_storage"] = 0
        self._stats["save_storage_bytes"] = 0

    def save_torch_storage_object_list(
        self, storage_obj_list: Iterable[Any], save_size: bool
    ) -> int:
        """Write storages one after another; how many bytes that is.

        save_size: before each stands its number of elements, as a little-endian integer of 8 bytes.
        """
        total = 0
        for storage in storage_obj_list:
            data = _bytes_of(storage)
            if save_size:
                total += self.write(_elements(storage).to_bytes(_SIZE, "little"))
            total += self.write(data)
            self._stats["save_storage"] += 1
            self._stats["save_storage_bytes"] += len(data)
        return total


def _bytes_of(storage: Any) -> memoryview:
    """The bytes of a storage, typed or not, without a copy where they are on the host."""
    untyped = storage.untyped() if hasattr(storage, "untyped") else storage
    flat = torch.empty(0, dtype=torch.uint8, device=untyped.device).set_(untyped)
    return memoryview(flat.cpu().numpy())  # type: ignore[arg-type]


def _elements(storage: Any) -> int:
    return int(storage.size())


class MockFileWriter(_Storages):
    """Makes the file and writes nothing into it: what it counts is what a program hands over."""

    def __init__(self, file_path: str | os.PathLike[str]) -> None:
        super().__init__(file_path)
        Path(file_path).touch()


@dataclass
class FastFileWriterConfig:
    """How `FastFileWriter` writes.

    dnvme_handle: accepted; files are written by the system's calls, past its cache where it allows
        that.
    pinned_tensor: uint8; its memory is the buffer.
    double_buffer: accepted.
    num_parallel_writers, writer_rank: of so many writers that are given the same storages this is
        which.
    """

    dnvme_handle: Any
    pinned_tensor: Tensor
    double_buffer: bool = True
    num_parallel_writers: int = 1
    writer_rank: int = 0
    global_rank: int = 0


class FastFileWriter(_Storages):
    """Collects what is written in a buffer of the caller's, and writes the buffer whenever it is
    full.

    `close` writes the rest and waits for the disk. Raises ValueError for a buffer that is not of
    bytes.
    """

    def __init__(self, file_path: str | os.PathLike[str], config: FastFileWriterConfig) -> None:
        super().__init__(file_path)
        if config.pinned_tensor.dtype is not torch.uint8 or config.pinned_tensor.numel() == 0:
            raise ValueError(
                "FastFileWriterConfig.pinned_tensor is a tensor of uint8 that is not empty"
            )
        self._config = config
        self._buffer = memoryview(config.pinned_tensor.flatten().numpy())  # type: ignore[arg-type]
        self._filled = 0
        self._descriptor = os.open(file_path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o666)

    def _write(self, buffer: Any) -> int:
        data = memoryview(buffer).cast("B")
        done = 0
        while done < len(data):
            # As much as the buffer has room for; a full buffer is written at once.
            count = min(len(data) - done, len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + count] = data[done : done + count]
            self._filled += count
            done += count
            if self._filled == len(self._buffer):
                self._drain()
        return len(data)

    def _drain(self) -> None:
        written = 0
        while written < self._filled:
            written += os.write(self._descriptor, self._buffer[written : self._filled])
        self._filled = 0

    def save_torch_storage_object_list(
        self, storage_obj_list: Iterable[Any], save_size: bool
    ) -> int:
        """Write storages; with several writers each writes its share of the bytes, of which the
        files are the parts.
        """
        writers = self._config.num_parallel_writers
        if writers == 1:
            return super().save_torch_storage_object_list(storage_obj_list, save_size)
        # Every writer computes the whole layout, and writes the part that overlaps with its share.
        pieces: list[Any] = []
        for storage in storage_obj_list:
            if save_size:
                pieces.append(_elements(storage).to_bytes(_SIZE, "little"))
            pieces.append(_bytes_of(storage))
        total = sum(len(piece) for piece in pieces)
        # The first `more` writers have one byte more.
        share, more = divmod(total, writers)
        rank = self._config.writer_rank
        first = share * rank + min(rank, more)
        last = first + share + (rank < more)
        at = written = 0
        for piece in pieces:
            start = max(first, at)
            end = min(last, at + len(piece))
            if start < end:
                written += self.write(memoryview(piece)[start - at : end - at])
            at += len(piece)
        self._stats["save_storage"] += len(pieces) // (2 if save_size else 1)
        self._stats["save_storage_bytes"] += written
        return written

    def flush(self) -> None:
        """Counted; a part of a buffer is written by `close`."""
        super().flush()

    def close(self) -> None:
        """Write what is left, and wait until it is on the disk."""
        super().close()
        if self._descriptor == NO_DESCRIPTOR:
            return
        try:
            self._drain()
            os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)
            self._descriptor = NO_DESCRIPTOR

    def __del__(self) -> None:
        if getattr(self, "_descriptor", NO_DESCRIPTOR) != NO_DESCRIPTOR:
            self.close()
