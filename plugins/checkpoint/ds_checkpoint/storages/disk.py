"""Checkpoints in folders of a disk: a temporary directory, renamed when it is whole (torch-free at
import).

See `ds_checkpoint.folder.files` for the renames and `ds_checkpoint.folder.lock` for the lock.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_checkpoint.folder import files
from ds_checkpoint.folder.format import DAMAGED, MANIFEST, README, Manifest, Mark, parse_manifest
from ds_checkpoint.folder.lock import FolderLock
from ds_checkpoint.folder.reader import PlainFile, Reader
from ds_checkpoint.storages.contract import Draft, Storage, Stored
from ds_core.errors import CheckpointError

if TYPE_CHECKING:
    from ds_checkpoint.folder.tensorfile import Item


class DiskCheckpoint(Stored):
    """A directory of files."""

    def __init__(self, path: Path) -> None:
        self.path: Path = path

    def path_of(self, name: str) -> Path:
        """See `Stored`."""
        return self.path / name

    def manifest(self) -> Manifest:
        """See `Stored`."""
        return parse_manifest(self.path / MANIFEST)

    def check_file(self, name: str, size: int) -> None:
        """See `Stored`; what is no regular file is refused by `open`."""
        file = self.path / name
        if not os.path.lexists(file):
            raise CheckpointError(f"{file} is missing; {DAMAGED}")
        found = file.lstat().st_size
        if found != size and file.is_file() and not file.is_symlink():
            raise CheckpointError(
                f"{file} has {found} bytes, it was written with {size}; {DAMAGED}"
            )

    def open(self, name: str) -> Reader:
        """See `Stored`."""
        return PlainFile(self.path / name)


class DiskDraft(Draft):
    """A temporary directory.

    final: the path that it gets.
    """

    def __init__(self, folder: Path, final: Path) -> None:
        self.folder = folder
        self._final = final

    def check(self) -> None:
        """See `Draft`."""
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder}, made by rank 0, is missing here; save_dir must be on storage all "
                "ranks share; or set checkpoint.use_node_local_storage, for folders of each host. "
                "Where its name has the time in it, ranks name different folders: make it on rank "
                "0 and broadcast it"
            )

    def write_tensors(self, name: str, items: Iterable[Item], metadata: Mapping[str, str]) -> Mark:
        """See `Draft`."""
        from ds_checkpoint.folder import tensorfile

        return tensorfile.write_tensors(self.folder / name, items, metadata)

    def finish(self) -> None:
        """See `Draft`."""
        files.sync_directory(self.folder)

    def seal(self, readme: bytes, manifest: bytes) -> None:
        """See `Draft`. The manifest comes last: a directory without it is no checkpoint."""
        files.write_file(self.folder / README, readme)
        files.write_file(self.folder / MANIFEST, manifest)

    def put_in_place(self) -> None:
        """See `Draft`."""
        files.put_in_place(self.folder, self._final)

    def discard(self) -> None:
        """See `Draft`."""
        files.discard(self.folder)

    def leave_report(self, rank: int, report: bytes) -> None:
        """See `Draft`."""
        files.replace_with(self._report(rank), lambda aside: files.write_file(aside, report))

    def take_reports(self, ranks: Iterable[int]) -> Mapping[int, bytes]:
        """See `Draft`."""
        found = {}
        for rank in ranks:
            path = self._report(rank)
            if path.is_file():
                found[rank] = path.read_bytes()
                path.unlink()
        return found

    @property
    def gone(self) -> bool:
        """See `Draft`."""
        return not self.folder.is_dir()

    def _report(self, rank: int) -> Path:
        return self.folder / f"rank{rank:05d}.report"


class DiskStorage(Storage):
    """A folder of checkpoints.

    root: it is made by the first save.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = FolderLock()

    def path(self, name: str = "") -> Path:
        """See `Storage`."""
        return self.root / name

    def exists(self) -> bool:
        """See `Storage`."""
        return self.root.is_dir()

    def tags(self) -> list[str]:
        """See `Storage`."""
        return files.existing_tags(self.root)

    def latest(self) -> str | None:
        """See `Storage`."""
        return files.read_latest(self.root)

    def find(self, tag: str) -> str:
        """See `Storage`."""
        return files.find(self.root, tag).name

    def open(self, name: str) -> DiskCheckpoint:
        """See `Storage`."""
        return DiskCheckpoint(self.root / name)

    def itself(self) -> DiskCheckpoint | None:
        """See `Storage`."""
        return DiskCheckpoint(self.root) if os.path.lexists(self.root / MANIFEST) else None

    def hold(self) -> None:
        """See `Storage`."""
        files.make_root(self.root)
        self._lock.take(self.root)

    def begin(self, tag: str, save_id: str) -> dict[str, Any]:
        """See `Storage`."""
        return {"name": files.make_temporary(self.root, tag).name}

    def join(self, tag: str, begun: Mapping[str, Any]) -> None:
        """The first rank of another host than rank 0's, which has a folder of its own: the same
        there.
        """
        if (self.root / begun["name"]).exists():
            raise CheckpointError(
                f"{self.root} is the same folder on several hosts; leave use_node_local_storage out"
            )
        self.hold()
        files.make_temporary(self.root, tag, begun["name"])

    def draft(self, tag: str, save_id: str, begun: Mapping[str, Any]) -> DiskDraft:
        """See `Storage`."""
        return DiskDraft(self.root / begun["name"], self.root / tag)

    def next_serial(self) -> int:
        """See `Storage`."""
        return files.next_serial(self.root)

    def write_latest(self, tag: str) -> None:
        """See `Storage`."""
        files.write_latest(self.root, tag)

    def remove(self, tag: str) -> None:
        """See `Storage`."""
        files.discard(self.root / tag)

    def close(self) -> None:
        """See `Storage`."""
        self._lock.close()
