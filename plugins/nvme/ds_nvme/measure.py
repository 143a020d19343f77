"""How fast a folder's disk is written and read with some settings (torch-free)."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ds_nvme.engines import Engine
from ds_nvme.files import ALIGNMENT, disk_error, open_file


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes per second."""

    write: float
    read: float


def measure(
    folder: str | Path, engine: Engine, *, nbytes: int, seconds: float = 0.5, checks: bool = False
) -> Speed:
    """Write and read a file of `nbytes` over and over, each for about `seconds`.

    checks: with checksums.
    """
    path = Path(folder) / f"bench-{os.getpid()}"
    nbytes = nbytes // ALIGNMENT * ALIGNMENT
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # no disk can compress it
    memory[:] = (os.urandom(1 << 20) * (nbytes // (1 << 20) + 1))[:nbytes]
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    sums: bytes | None = b"" if checks else None

    def move(write: bool) -> bytes:
        file = open_file(path, write=write)
        transfer = engine.start(
            file, write=write, offset=0, address=address, nbytes=nbytes, sums=sums
        )
        transfer.wait()
        return transfer.sums()

    try:
        file = open_file(path, write=True, create=True)
        try:
            os.posix_fallocate(file.descriptor, 0, nbytes)
        except OSError as error:
            raise disk_error("create", path, error.errno or 0, f"({nbytes:,} bytes)") from error
        # the first write takes longer: the file system notes that there is something now
        made = move(True)
        write = _rate(lambda: move(True), nbytes, seconds)
        sums = made if checks else None
        return Speed(write, _rate(lambda: move(False), nbytes, seconds))
    finally:
        path.unlink(missing_ok=True)


def _rate(move: Callable[[], object], nbytes: int, seconds: float) -> float:
    """Bytes per second of a call that moves `nbytes`."""
    begin = time.perf_counter()
    moved = 0
    while (took := time.perf_counter() - begin) < seconds or not moved:
        move()
        moved += nbytes
    return moved / took
