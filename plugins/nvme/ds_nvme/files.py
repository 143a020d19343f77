"""Files that hold tensors: opening them for direct I/O, their errors, and the folder of a run (torch-free).

[Note: folders and locks] Each process has a folder of its own below ``nvme_path/ds_nvme``, with a file ``lock`` that it
holds locked. The operating system gives the lock up when the process ends, however it ends. So a folder whose lock can
be taken is a leftover of a run that was killed, and whoever comes next removes it; a folder whose lock is held belongs
to a run that is alive, in this job or another one. Folders are made and looked through under the lock of
``nvme_path/ds_nvme``, so that nobody sees one that has no lock yet.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from ds_core.errors import DSError

__all__ = ["ALIGNMENT", "DiskError", "Opened", "RunFolder", "disk_error", "open_file", "padded"]

log = logging.getLogger("ds_nvme")

ALIGNMENT = 4096
"""Offsets, lengths and addresses of direct I/O are multiples of it."""

_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space, or set nvme_path to a folder on a larger disk",
    errno.EDQUOT: "the quota is used up; free some space, or set nvme_path to a folder on another disk",
    errno.EFBIG: "the file system or `ulimit -f` does not allow files of this size",
    errno.EIO: "the device reported an I/O error; look at `dmesg`, and set nvme_path to a folder on another disk",
    errno.EROFS: "the file system is read-only; look at `dmesg`, or set nvme_path to another folder",
    errno.EACCES: "the folder must be writable by this user",
    errno.EPERM: "the folder must be writable by this user",
    errno.ENOENT: "the file or its folder was removed while the run used it",
    errno.ENOTDIR: "nvme_path must be a folder",
    errno.EMFILE: "too many open files; raise `ulimit -n`",
    errno.ENFILE: "too many open files on this machine",
    errno.ENODEV: "the device is gone; look at `dmesg`",
    errno.ENXIO: "the device is gone; look at `dmesg`",
    errno.ESTALE: "the network file system has lost the file",
    errno.ETIMEDOUT: "the device or its server does not answer",
    errno.EINVAL: "the file system refuses this request; `dscore io bench` on the folder shows what it supports",
}


class DiskError(DSError, RuntimeError):
    """A file of offloaded tensors cannot be written or read, or has other contents than were written.

    path: the file. errno: the operating system's number of the error; None where there is none.
    """

    def __init__(self, message: str, path: str = "", number: int | None = None) -> None:
        super().__init__(message)
        self.path, self.errno = path, number


def disk_error(doing: str, path: str | Path, number: int, at: str = "") -> DiskError:
    """The error for errno `number`. doing: "write", "read", "open" and so on. at: which part of the file."""
    advice = _ADVICE.get(number, "look at `dmesg` and at the folder")
    return DiskError(f"cannot {doing} {path}{at and ' ' + at}: {os.strerror(number)}; {advice}", str(path), number)


def padded(nbytes: int) -> int:
    """`nbytes`, rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Opened:
    """An open file. direct: whether it bypasses the page cache."""

    def __init__(self, path: str, descriptor: int, direct: bool) -> None:
        self.path, self.descriptor, self.direct = path, descriptor, direct

    def close(self) -> None:
        """May be called again."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def open_file(path: str | Path, *, write: bool, direct: bool = True, create: bool = False) -> Opened:
    """Open `path`; without direct I/O where the file system has none."""
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    o_direct: int = getattr(os, "O_DIRECT", 0) if direct else 0
    try:
        return Opened(str(path), os.open(path, flags | o_direct, 0o600), bool(o_direct))
    except OSError as error:
        if not (o_direct and error.errno in (errno.EINVAL, errno.EOPNOTSUPP)):
            raise disk_error("create" if create else "open", path, error.errno or 0) from error
    try:
        return Opened(str(path), os.open(path, flags, 0o600), False)
    except OSError as error:
        raise disk_error("create" if create else "open", path, error.errno or 0) from error


class RunFolder:
    """This process's folder below `root`, and its lock. See [Note: folders and locks].

    path: the folder. swept: the leftovers that were removed.
    """

    def __init__(self, root: str | Path, rank: int = 0) -> None:
        self.root = Path(root).expanduser().absolute() / "ds_nvme"
        self.swept: list[Path] = []
        dead: list[tuple[Path, int]] = []
        name = f"rank{rank}-{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            for left in reversed(range(10)):
                try:
                    dead = self._make(name)
                    break
                except FileNotFoundError:  # the last run has just removed `root` behind itself
                    if not left:
                        raise
        except OSError as error:
            raise disk_error("use nvme_path:", error.filename or self.root, error.errno or 0) from error
        for folder, lock in dead:
            shutil.rmtree(folder, ignore_errors=True)
            self.swept.append(folder)
            if lock >= 0:
                os.close(lock)
        if self.swept:
            names = ", ".join(f.name for f in self.swept)
            log.info("removed what runs that were killed have left in %s: %s", self.root, names)

    def _make(self, name: str) -> list[tuple[Path, int]]:
        """Make and lock the folder; the leftovers beside it."""
        self.root.mkdir(parents=True, exist_ok=True)
        with _locked_folder(self.root):
            self.path = self.root / name
            self.path.mkdir(mode=0o700)
            self._lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return list(self._leftovers())

    def _leftovers(self) -> Iterator[tuple[Path, int]]:
        """Folders whose owner is gone, and the descriptors that hold their locks."""
        for folder in self.root.iterdir():
            if folder == self.path or not folder.is_dir():
                continue
            try:
                lock = os.open(folder / "lock", os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                yield folder, -1  # its owner ended between making the folder and the lock
                continue
            except OSError:
                continue  # another user's
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield folder, lock
            except OSError:
                os.close(lock)

    def free(self) -> int:
        """Free bytes of the file system."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        """Remove the folder. May be called again."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(lock)
            with contextlib.suppress(OSError):
                self.root.rmdir()  # the last run's


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
