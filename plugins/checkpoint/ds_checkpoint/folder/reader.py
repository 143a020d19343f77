"""A stored file that is open for reading, and the one kind of it that a disk has (torch-free)."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

from ds_run_state.opening import open_plain

from ds_checkpoint.folder.format import DAMAGED
from ds_core.errors import CheckpointError

# Bytes that are read at once: they fit into the processor's cache.
_BLOCK = 1 << 20


class Reader(ABC):
    """Reads ranges of one file, which must not change meanwhile.

    path: how messages call the file.

    Every method may raise FileNotFoundError where there is no such file, and CheckpointError naming
    it.
    """

    path: Path | str

    @abstractmethod
    def size(self) -> int:
        """The file's bytes."""

    @abstractmethod
    def read_into(self, place: int, view: memoryview) -> int:
        """Fill `view` with the bytes from `place` on; how many there were, fewer only at the
        end.
        """

    @abstractmethod
    def blocks(self) -> Iterator[memoryview]:
        """The whole file in order; a block is valid until the next one."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file; a read opens it again."""


class PlainFile(Reader):
    """A regular file of a disk.

    links: whether `path` may be a link.
    """

    def __init__(self, path: Path, *, links: bool = False) -> None:
        self.path: Path = path
        self._links = links
        self._handle: FileIO | None = None
        self._identity: tuple[int, ...] | None = None

    @property
    def _file(self) -> FileIO:
        """The file, opened again if it was closed meanwhile, and known to be the one that was
        opened first.
        """
        if self._handle is None:
            descriptor, _ = open_plain(self.path, links=self._links)
            self._handle = open(descriptor, "rb", buffering=0)  # noqa: SIM115
            # A file that was closed to stay below the limit of open files may have been replaced
            # since.
            status = os.fstat(descriptor)
            identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            if self._identity not in (None, identity):
                raise CheckpointError(
                    f"{self.path}: it was changed while it was being read; {DAMAGED}"
                )
            self._identity = identity
        return self._handle

    def size(self) -> int:
        """See `Reader`."""
        return os.fstat(self._file.fileno()).st_size

    def read_into(self, place: int, view: memoryview) -> int:
        """See `Reader`."""
        self._file.seek(place)
        done = 0
        while done < len(view):
            count = self._file.readinto(view[done : done + (1 << 28)])
            if not count:
                break
            done += count
        return done

    def blocks(self) -> Iterator[memoryview]:
        """See `Reader`; from the disk, or the system's cache."""
        block = bytearray(_BLOCK)
        self._file.seek(0)
        if hasattr(os, "posix_fadvise"):  # read further ahead
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        while count := self._file.readinto(block):
            yield memoryview(block)[:count]

    def close(self) -> None:
        """See `Reader`."""
        if self._handle is not None:
            self._handle.close()
            self._handle = None
