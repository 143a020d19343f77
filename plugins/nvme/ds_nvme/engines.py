"""Who moves bytes between memory and files: the contract of engines, and the one in Python
(torch-free).

A transfer is one read or write of a range of a file. It is cut into blocks of ``block_size``; at
most ``queue_depth`` of them are under way at a time. What the operating system moved only in part
is continued.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import struct
import zlib
from abc import ABC, abstractmethod
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from ds_nvme.files import ALIGNMENT, DiskError, Opened, disk_error

log = logging.getLogger("ds_nvme")

SLOW = 10.0
"""Seconds after which a log line says that a transfer is still under way."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How an engine works; keys of the section ``aio``."""

    # Bytes of a request.
    block_size: int = 1 << 20
    # Requests under way.
    queue_depth: int = 8
    # That share each transfer.
    threads: int = 1
    # One request per system call.
    single_submit: bool = False
    # Begin a request as soon as another one is done, not when all are.
    overlap_events: bool = True


class Transfer(ABC):
    """A read or write that is under way.

    The memory must stay where it is until `wait` has returned or raised.
    """

    def __init__(self, file: Opened, *, write: bool, offset: int, nbytes: int) -> None:
        self.file = file
        self.write = write
        self.offset = offset
        self.nbytes = nbytes
        # The result is kept, so that every `wait` raises the same error.
        self._over = False
        self._error: DiskError | None = None

    @property
    def doing(self) -> str:
        """For messages."""
        return "write" if self.write else "read"

    def sums(self) -> bytes:
        """Of a write that is done, where they were asked for: the checksums of its blocks."""
        return b""

    @abstractmethod
    def done(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def _wait(self, seconds: float) -> bool:
        """Wait at most so long; whether it is done."""

    @abstractmethod
    def _result(self) -> None:
        """Raise DiskError if it has failed."""

    def wait(self) -> None:
        """Wait until it is done; says so in the log when that takes long.

        Raises DiskError, each time it is called.
        """
        waited = 0.0
        while not self._over and not self._wait(SLOW):
            waited += SLOW
            log.warning(
                "the %s of %s (%d bytes) has been under way for %.0f s: the disk is slow, or does "
                "not answer",
                *(self.doing, self.file.path, self.nbytes, waited),
            )
        if not self._over:
            self._over = True
            try:
                # Once: the file is closed after it.
                self._result()
            except DiskError as error:
                self._error = error
            self.file.close()
        if self._error is not None:
            raise self._error


class Engine(ABC):
    """Moves bytes between memory and files.

    name: which engine it is.
    """

    name: str

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @abstractmethod
    def start(
        self,
        file: Opened,
        *,
        write: bool,
        offset: int,
        address: int,
        nbytes: int,
        sums: bytes | None = None,
    ) -> Transfer:
        """Start to move `nbytes` between memory at `address` and `file`, which is closed in the
        end.

        Of a file that is open for direct I/O, all three numbers are multiples of ALIGNMENT.

        sums: with b"" a write makes checksums (see `Transfer.sums`), with those a read compares
            them; None: neither.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for what is under way, and end the threads. May be called again."""


class ThreadsEngine(Engine):
    """``threads`` in Python: pread and pwrite in a pool of threads."""

    name = "python threads"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        # Each block of a transfer is a job of its own; more threads than 16 do not make a disk
        # faster.
        workers = max(settings.threads, min(settings.queue_depth, 16))
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="ds_nvme")

    def start(
        self,
        file: Opened,
        *,
        write: bool,
        offset: int,
        address: int,
        nbytes: int,
        sums: bytes | None = None,
    ) -> Transfer:
        """See `Engine`."""
        step = self.settings.block_size
        begins = range(0, nbytes, step)
        expected: list[int | None] = [None] * len(begins)
        if sums is not None and not write:
            expected = _unpack(sums, len(begins))
        blocks = [
            self._pool.submit(
                _move,
                file,
                write=write,
                offset=offset + begin,
                address=address + begin,
                nbytes=min(step, nbytes - begin),
                checks=sums is not None,
                expected=wanted,
            )
            for begin, wanted in zip(begins, expected, strict=True)
        ]
        return _Futures(file, blocks, write=write, offset=offset, nbytes=nbytes)

    def close(self) -> None:
        """See `Engine`."""
        self._pool.shutdown()


class _Futures(Transfer):
    def __init__(
        self, file: Opened, blocks: list[Future[int]], *, write: bool, offset: int, nbytes: int
    ) -> None:
        super().__init__(file, write=write, offset=offset, nbytes=nbytes)
        self._blocks = blocks

    def done(self) -> bool:
        return all(b.done() for b in self._blocks)

    def _wait(self, seconds: float) -> bool:
        return not wait(self._blocks, timeout=seconds).not_done

    def _result(self) -> None:
        for block in self._blocks:
            block.result()

    def sums(self) -> bytes:
        """See `Transfer`."""
        return b"".join(_SUM.pack(block.result()) for block in self._blocks)


# CRC-32: of what Python brings, the fastest sum that releases the interpreter's lock
_SUM = struct.Struct("<I")


def _unpack(sums: bytes, blocks: int) -> list[int | None]:
    """The sum of each block; -1, which none has, where there are none."""
    if len(sums) != blocks * _SUM.size:
        return [-1] * blocks
    return [row[0] for row in _SUM.iter_unpack(sums)]


def _move(
    file: Opened,
    *,
    write: bool,
    offset: int,
    address: int,
    nbytes: int,
    checks: bool,
    expected: int | None,
) -> int:
    """Move one block; its checksum where `checks`, else 0.

    expected: what the sum of a block that is read must be.
    """
    memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
    call = os.pwritev if write else os.preadv
    done = 0
    while done < nbytes:
        try:
            moved = call(file.descriptor, [memory[done:]], offset + done)
        # A signal came before anything was moved.
        except InterruptedError:
            continue
        except OSError as error:
            raise disk_error(
                "write" if write else "read", file.path, error.errno or 0, f"at {offset + done}"
            ) from None
        before, done = done, done + moved
        # What was moved in part is continued; direct I/O from the last multiple on, so some bytes
        # go twice.
        if file.direct and done < nbytes:
            done -= done % ALIGNMENT
        # No progress: it would go on for ever.
        if done <= before:
            raise ended(file.path, write, offset + done)
    found = zlib.crc32(memory) if checks else 0
    if expected is not None and found != expected:
        raise changed(file.path, offset)
    return found


def changed(path: str, offset: int) -> DiskError:
    """What is read is not what was written."""
    return DiskError(
        f"{path} has other contents at {offset} than were written: the disk has changed them, or "
        "another program has; "
        "the run cannot continue from there: load a checkpoint, and look at `dmesg`",
        path,
    )


def ended(path: str, write: bool, offset: int) -> DiskError:
    """A transfer that makes no progress."""
    if write:
        return disk_error("write", path, errno.ENOSPC, f"at {offset}")
    return DiskError(
        f"cannot read {path} at {offset}: the file ends there, and more was written to it; "
        "something else has "
        "shortened it",
        path,
    )
