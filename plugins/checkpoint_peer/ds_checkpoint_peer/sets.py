"""One set of all ranks' states in memory: written, copied to neighbours, and only then complete.

This runs in a thread of each rank while training goes on. Files and manifest are those of a
checkpoint on disk. A set exists once its manifest is in place on every host, which happens when all
ranks have said that all files of all hosts are written and, at the neighbours, as they were sent.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
import xxhash
from ds_checkpoint.collective_errors import describe
from ds_checkpoint.folder import files
from ds_checkpoint.folder.format import MANIFEST, README
from ds_checkpoint.folder.tensorfile import as_bytes
from ds_checkpoint.folder.writing import Prepared, SaveJob, seal, write
from ds_checkpoint.storages.disk import DiskDraft, DiskStorage
from torch import Tensor

from ds_checkpoint_peer.exchange import BLOCK, Circle, Pace, send_to_all, swap, tell_all
from ds_core.errors import CheckpointError

FULL = "checkpoint_peer.max_bytes"
_MORE = 1 << 20
"""Bytes that a rank's files may have besides their tensors: headers and values."""


@dataclass(frozen=True, slots=True)
class Limits:
    """See `PeerConfig`."""

    neighbours: int
    max_bytes: int | None
    max_bytes_per_second: int | None


def keep(
    circle: Circle, copied: Prepared | Exception, job: SaveJob, room: Path, limits: Limits
) -> None:
    """Make the set of `job`. Collective among the ranks' threads.

    copied: this rank's states, or why they could not be copied.

    CheckpointError on every rank when it fails on any; the set of before is then still there.
    """
    assert isinstance(job.draft, DiskDraft) and isinstance(job.storage, DiskStorage)
    draft = job.draft
    try:
        # Before a byte is written: is there memory for this set beside the newest that is whole?
        sizes = _agree(circle, lambda: _size(copied))
        assert isinstance(copied, Prepared)
        prepared = copied
        _agree(circle, lambda: _begin(circle, job, room, sizes, limits) if circle.leads else None)
        written = _agree(circle, lambda: write(prepared, job))
        for shift in range(1, _neighbours(circle, limits) + 1):
            _agree(circle, lambda s=shift: _copy(circle, draft.folder, written, s, limits))
        # All files are where they belong: the manifest may say so.
        _agree(circle, lambda: seal(prepared, job, written) if circle.rank == 0 else None)
        manifest, readme = (_spread(circle, draft.folder / name) for name in (MANIFEST, README))
        _agree(circle, lambda: _place(circle, job, readme, manifest) if circle.leads else None)
    except CheckpointError:
        if circle.leads:
            with contextlib.suppress(OSError):
                files.discard(draft.folder)
        raise


def _size(copied: Prepared | Exception) -> int:
    """The bytes of this rank's files, and a little more."""
    if isinstance(copied, Exception):
        raise copied
    tensors = [p.tensor for p in copied.pieces]
    tensors += [*copied.local_tensors.values(), *copied.common_tensors.values()]
    return sum(t.numel() * t.itemsize for t in tensors) + _MORE


def _agree(circle: Circle, work: Any) -> list[Any]:
    """Do `work` on this rank; its result of every rank. CheckpointError on all when it fails on one."""
    cause: Exception | None = None
    try:
        row = {"result": work()}
    except Exception as error:  # whatever it is, the other ranks are waiting for word
        cause = error
        row = {"error": describe(error)}
    rows = tell_all(circle, row)
    for rank, found in enumerate(rows):
        if "error" in found:
            raise CheckpointError(f"rank {rank}: {found['error']}") from cause
    return [found["result"] for found in rows]


def _neighbours(circle: Circle, limits: Limits) -> int:
    return min(limits.neighbours, len(circle.leaders) - 1)


def _begin(circle: Circle, job: SaveJob, room: Path, sizes: Sequence[int], limits: Limits) -> None:
    """Once per host: make way for the set, and the directory that its ranks write into."""
    tags = files.existing_tags(room)
    if tags:
        job.storage.prune(1, tags[0])
    files.clean(room)
    hosts = len(circle.leaders)
    # This host's own files, and those of the hosts before it.
    held = [(circle.host - shift) % hosts for shift in range(_neighbours(circle, limits) + 1)]
    coming = sum(sizes[rank] for host in held for rank in circle.members(host))
    there = sum(path.stat().st_size for path in room.glob("*/*.safetensors"))
    if limits.max_bytes is not None and there + coming > limits.max_bytes:
        raise CheckpointError(
            f"{there + coming} bytes are needed, of which {there} are the set of before; "
            f"{FULL} is {limits.max_bytes}"
        )
    status = os.statvfs(room)
    if (free := status.f_bavail * status.f_frsize) < coming:
        raise CheckpointError(f"{coming} bytes are needed, and {room.parent} has {free} free")
    assert isinstance(job.draft, DiskDraft)
    job.draft.folder.mkdir(mode=0o700)


def _copy(circle: Circle, folder: Path, written: Sequence[Any], shift: int, limits: Limits) -> None:
    """Between hosts: send this host's files to the one `shift` places on, and take another's."""
    if not circle.leads:
        return
    hosts = len(circle.leaders)
    after = (circle.host + shift) % hosts
    before = (circle.host - shift) % hosts
    coming = _marks(circle, written, before)
    blocks = swap(
        circle,
        circle.leaders[after],
        _blocks(folder, _marks(circle, written, circle.host)),
        circle.leaders[before],
        [n for size, _ in coming.values() for n in _cut(size)],
        Pace(limits.max_bytes_per_second),
    )
    faults: list[Exception] = []
    for name, (size, checksum) in coming.items():
        # Every block is taken, whatever happens here: the other side sends it.
        try:
            arrived = _receive(folder / name, size, blocks)
        except OSError as error:
            faults.append(error)
        else:
            if arrived != checksum:
                faults.append(CheckpointError(f"{name} did not arrive as it was sent"))
    # What this host has to send may be more.
    for _ in blocks:
        raise AssertionError("more was sent than was announced")
    if faults:
        raise faults[0]


def _receive(path: Path, size: int, blocks: Iterator[Tensor]) -> str:
    """Write the next `size` bytes of `blocks` to a new file; their checksum.

    An OSError is raised when all of them are taken.
    """
    fault: OSError | None = None
    digest = xxhash.xxh3_128()
    with contextlib.ExitStack() as opened:
        file: FileIO | None = None
        try:
            file = opened.enter_context(open(path, "xb", buffering=0))
        except OSError as error:
            fault = error
        for _ in _cut(size):
            data = as_bytes(next(blocks))
            digest.update(data)
            try:
                while data and file is not None and fault is None:
                    data = data[file.write(data) :]
            except OSError as error:
                fault = error
    if fault is not None:
        raise fault
    return digest.hexdigest()


def _marks(circle: Circle, written: Sequence[Any], host: int) -> dict[str, tuple[int, str]]:
    """(size, checksum) of each file that the ranks of a host have written, by name, in order."""
    found: dict[str, tuple[int, str]] = {}
    for rank in circle.members(host):
        found |= {
            name: (size, checksum) for name, (size, checksum) in written[rank]["files"].items()
        }
    return dict(sorted(found.items()))


def _cut(size: int) -> Iterator[int]:
    """The sizes of a file's blocks."""
    for start in range(0, size, BLOCK):
        yield min(BLOCK, size - start)


def _blocks(folder: Path, marks: dict[str, tuple[int, str]]) -> Iterator[Tensor]:
    """The bytes of files, as many as were told; of one that is not there or too short, zeros,
    which the other side finds by the checksum.
    """
    for name, (size, _) in marks.items():
        with contextlib.ExitStack() as opened:
            file: FileIO | None = None
            with contextlib.suppress(OSError):
                file = opened.enter_context(open(folder / name, "rb", buffering=0))
            for count in _cut(size):
                block = torch.zeros(count, dtype=torch.uint8)
                view = as_bytes(block)
                while view and file is not None and (read := file.readinto(view)):
                    view = view[read:]
                yield block


def _spread(circle: Circle, path: Path) -> bytes:
    """Rank 0's file, on every rank."""
    return send_to_all(circle, path.read_bytes() if circle.rank == 0 else b"")


def _place(circle: Circle, job: SaveJob, readme: bytes, manifest: bytes) -> None:
    """Once per host: give the set its manifest and its name."""
    if circle.rank:
        job.draft.seal(readme, manifest)
    job.draft.put_in_place()
    job.storage.write_latest(job.tag)
