"""Which engine serves a folder: the first that really writes and reads a file there
(torch-free)."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ds_core.errors import DSError, UsageError
from ds_nvme.engines import Engine, Settings, ThreadsEngine
from ds_nvme.files import ALIGNMENT, open_file
from ds_nvme.native import KINDS, NativeEngine, available

if TYPE_CHECKING:
    from ds_nvme.aio import AsyncIO

log = logging.getLogger("ds_nvme")

ENGINES = (*KINDS, "python threads")
"""Every engine, best first."""


@dataclass(frozen=True, slots=True)
class Probed:
    """An engine, or why it cannot be used."""

    name: str
    # None: it cannot be used.
    engine: Engine | None
    # Why not.
    why: str = ""


def settings(aio: AsyncIO) -> Settings:
    """What the section ``aio`` says of engines."""
    return Settings(
        aio.block_size,
        aio.queue_depth,
        aio.intra_op_parallelism,
        aio.single_submit,
        aio.overlap_events,
    )


def open_engine(name: str, wanted: Settings) -> Engine:
    """An engine by its name. Raises RuntimeError or DSError with the reason why there is none."""
    if name == "python threads":
        return ThreadsEngine(wanted)
    if (reason := available()) is not None:
        raise UsageError(reason)
    return NativeEngine(name, wanted)


def probe(folder: str | Path, wanted: Settings) -> Iterator[Probed]:
    """All engines in order, each tried with a file in `folder`; who asks for the next one closes
    the last one.
    """
    for name in ENGINES:
        try:
            engine = open_engine(name, wanted)
        except (DSError, RuntimeError, OSError) as error:
            yield Probed(name, None, str(error))
            continue
        try:
            # Only a real transfer tells: kernels and containers refuse io_uring late, file systems
            # direct I/O.
            _try(engine, Path(folder))
        except DSError as error:
            engine.close()
            yield Probed(name, None, str(error))
        else:
            yield Probed(name, engine)


def choose(folder: str | Path, wanted: Settings, name: str | None = None) -> Engine:
    """The best engine for `folder`, or the one called `name`; says in the log which one, and why
    not the others.
    """
    passed: list[str] = []
    for found in probe(folder, wanted):
        if found.engine is not None and name in (None, found.name):
            how = (
                "direct I/O"
                if direct(folder)
                else "through the page cache: the file system has no direct I/O"
            )
            log.info(
                "%s is served by %s, %s%s",
                folder,
                found.name,
                how,
                "".join(f"; not by {p}" for p in passed),
            )
            return found.engine
        if found.engine is not None:
            found.engine.close()
        elif name == found.name:
            raise UsageError(
                f"aio.engine: {name!r} does not work in {folder}: {found.why}; leave it out, or "
                "take another"
            )
        passed.append(f"{found.name}: {found.why or 'not asked for'}")
    raise UsageError(f"no engine can write and read in {folder}: {'; '.join(passed)}")


def direct(folder: str | Path) -> bool:
    """Whether files in `folder` can be open for direct I/O."""
    path = Path(folder) / f"probe-{os.getpid()}"
    try:
        file = open_file(path, write=True, create=True)
        file.close()
        return file.direct
    finally:
        path.unlink(missing_ok=True)


def _try(engine: Engine, folder: Path) -> None:
    """Write a file and read it back. Raises DiskError."""
    path = folder / f"probe-{os.getpid()}"
    out = mmap.mmap(-1, 2 * ALIGNMENT)
    back = mmap.mmap(-1, 2 * ALIGNMENT)
    # Not zeros, which a file has anyhow.
    out[:] = os.urandom(2 * ALIGNMENT)
    try:
        for memory, write in ((out, True), (back, False)):
            file = open_file(path, write=write, create=write)
            address = _address(memory)
            engine.start(file, write=write, offset=0, address=address, nbytes=2 * ALIGNMENT).wait()
        if out[:] != back[:]:
            raise UsageError("a file has other contents than were written")
    finally:
        path.unlink(missing_ok=True)


def _address(memory: mmap.mmap) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
