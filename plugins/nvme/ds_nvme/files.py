"""Files that hold tensors: opening them for direct I/O, their errors, and the folder of a run
(torch-free).

[Note: folders and locks] Each process has a folder of its own below ``nvme_path/ds_nvme-UID``, with
a file ``lock`` that it holds locked. The operating system gives the lock up when the process ends,
however it ends. So a folder whose lock can be taken is a leftover of a run that was killed, and
whoever comes next removes it; a folder whose lock is held belongs to a run that is alive, in this
job or another one. Folders are made and looked through under the lock of ``nvme_path/ds_nvme-UID``,
so that nobody sees one that has no lock yet.

nvme_path may be shared with strangers. So the root is this user's or refused, nothing is reached
through a link, and only folders with the name that a run on this host gives its own are looked at.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from ds_core.errors import DSError

log = logging.getLogger("ds_nvme")

ALIGNMENT = 4096
"""Offsets, lengths and addresses of direct I/O are multiples of it."""

LOCK_LIMIT = 60.0
"""Seconds after which a lock that is held for an instant by design is an error."""
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW

_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space, or set nvme_path to a folder on a larger "
    "disk",
    errno.EDQUOT: "the quota is used up; free some space, or set nvme_path to a folder on another "
    "disk",
    errno.EFBIG: "the file system or `ulimit -f` does not allow files of this size",
    errno.EIO: "the device reported an I/O error; look at `dmesg`, and set nvme_path to a folder "
    "on another disk",
    errno.EROFS: "the file system is read-only; look at `dmesg`, or set nvme_path to another "
    "folder",
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
    errno.EINVAL: "the file system refuses this request; `dscore io bench` on the folder shows "
    "what it supports",
}


class DiskError(DSError, RuntimeError):
    """A file of offloaded tensors cannot be written or read, or has other contents than were
    written.

    path: the file.
    errno: the operating system's number of the error; None where there is none.
    """

    def __init__(self, message: str, path: str = "", number: int | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.errno = number


def disk_error(doing: str, path: str | Path, number: int, at: str = "") -> DiskError:
    """The error for errno `number`.

    doing: "write", "read", "open" and so on.
    at: which part of the file.
    """
    advice = _ADVICE.get(number, "look at `dmesg` and at the folder")
    return DiskError(
        f"cannot {doing} {path}{at and ' ' + at}: {os.strerror(number)}; {advice}",
        str(path),
        number,
    )


def padded(nbytes: int) -> int:
    """`nbytes`, rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Opened:
    """An open file.

    direct: whether it bypasses the page cache.
    """

    def __init__(self, path: str, descriptor: int, direct: bool) -> None:
        self.path = path
        self.descriptor = descriptor
        self.direct = direct

    def close(self) -> None:
        """May be called again."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def open_file(
    path: str | Path, *, write: bool, direct: bool = True, create: bool = False
) -> Opened:
    """Open `path`; without direct I/O where the file system has none."""
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    o_direct: int = getattr(os, "O_DIRECT", 0) if direct else 0
    doing = "create" if create else "open"
    try:
        return Opened(str(path), _open_storage(path, flags | o_direct), bool(o_direct))
    except OSError as error:
        # File systems without direct I/O (tmpfs, some network ones) refuse the flag; anything else
        # is an error of the file.
        if not (o_direct and error.errno in (errno.EINVAL, errno.EOPNOTSUPP)):
            raise disk_error(doing, path, error.errno or 0) from error
    try:
        return Opened(str(path), _open_storage(path, flags), False)
    except OSError as error:
        raise disk_error(doing, path, error.errno or 0) from error


def _open_storage(path: str | Path, flags: int) -> int:
    """A descriptor of a file or device. A FIFO would be waited for, so it is refused."""
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o600)
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DiskError(f"{path} is a FIFO, which has taken a file's place", str(path))
    os.set_blocking(descriptor, True)  # io_uring would give up what it cannot do at once
    return descriptor


class RunFolder:
    """This process's folder below `root`, and its lock. See [Note: folders and locks].

    path: the folder.
    swept: the leftovers that were removed.
    """

    def __init__(self, root: str | Path, rank: int = 0) -> None:
        self.root = Path(root).expanduser().absolute() / f"ds_nvme-{os.geteuid()}"
        host = socket.gethostname()
        # A leftover is known by its whole name: what another program made here is never removed.
        self._ours = re.compile(rf"rank\d+-{re.escape(host)}-\d+-[0-9a-f]{{8}}", re.ASCII)
        self.path = self.root / f"rank{rank}-{host}-{os.getpid()}-{secrets.token_hex(4)}"
        self.swept: list[Path] = []
        dead: list[tuple[str, int]] = []
        self._lock = -1
        try:
            # Another run may remove `root` behind itself between making and opening it.
            for left in reversed(range(10)):
                try:
                    dead = self._make()
                    break
                except FileNotFoundError:  # the last run has just removed `root` behind itself
                    if not left:
                        raise
        except OSError as error:
            place = error.filename if os.path.isabs(error.filename or "") else self.root
            raise disk_error("use nvme_path:", place, error.errno or 0) from error
        for name, lock in dead:
            self._remove(name)
            self.swept.append(self.root / name)
            os.close(lock)
        if self.swept:
            names = ", ".join(f.name for f in self.swept)
            log.info("removed what runs that were killed have left in %s: %s", self.root, names)

    def _make(self) -> list[tuple[str, int]]:
        """Make and lock the folder; the leftovers beside it, and descriptors that hold their
        locks."""
        with contextlib.suppress(FileExistsError):
            self.root.mkdir(mode=0o700, parents=True)
        with _own_folder(self.root) as root:
            # Under the root's lock no other process sees our folder before it has its lock.
            _take_lock(root, self.root)
            os.mkdir(self.path.name, 0o700, dir_fd=root)
            with _below(root, self.path.name) as folder:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._lock = os.open("lock", flags, 0o600, dir_fd=folder)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return list(self._leftovers(root))

    def _leftovers(self, root: int) -> Iterator[tuple[str, int]]:
        """Folders whose owner is gone, and the descriptors that hold their locks; `root` is
        locked."""
        for name in sorted(os.listdir(root)):
            if name == self.path.name or not self._ours.fullmatch(name):
                continue
            try:
                with _below(root, name) as folder:
                    # A folder of this name by another user: not ours to remove.
                    if os.fstat(folder).st_uid != os.geteuid():
                        continue
                    lock = os.open("lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
            except FileNotFoundError:
                # its owner ended before it made the lock, or any file
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=root)
                    self.swept.append(self.root / name)
                continue
            except OSError:
                continue  # a link, or no folder
            try:
                # Whoever gets the lock knows that its owner is gone, and keeps all others from
                # removing it too.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield name, lock
            except OSError:
                os.close(lock)

    def _remove(self, name: str) -> None:
        """Remove a folder of ours, by way of a descriptor: `root` may have been exchanged for a
        link meanwhile.
        """
        with contextlib.suppress(OSError, DiskError), _own_folder(self.root) as root:
            _remove_tree(root, name)

    def free(self) -> int:
        """Free bytes of the file system."""
        found = os.statvfs(self.path)
        return found.f_bavail * found.f_frsize

    def close(self) -> None:
        """Remove the folder. May be called again."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            # While the lock is still held, so that no other run sweeps the folder at the same time.
            self._remove(self.path.name)
            os.close(lock)
            with contextlib.suppress(OSError):
                self.root.rmdir()  # the last run's


@contextlib.contextmanager
def _below(folder: int, name: str) -> Iterator[int]:
    """A descriptor of a folder in another one; OSError where it is a link or no folder."""
    descriptor = os.open(name, _FOLDER, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _own_folder(path: Path) -> Iterator[int]:
    """A descriptor of a folder of this user's; DiskError for a link or another's."""
    try:
        descriptor = os.open(path, _FOLDER)
    except OSError as error:
        if not path.is_symlink():
            raise
        raise DiskError(
            f"nvme_path: {path} is a link; remove it, or set nvme_path to another folder", str(path)
        ) from error
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise DiskError(
                f"nvme_path: {path} belongs to user {found.st_uid}; set nvme_path to another "
                "folder",
                str(path),
            )
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_tree(folder: int, name: str) -> None:
    """Remove `name` in a folder with all that is in it; links are removed, and never followed."""
    with _below(folder, name) as below:
        for entry in os.listdir(below):
            try:
                # Below a descriptor: no name on the way can be exchanged for a link.
                os.unlink(entry, dir_fd=below)
            except (IsADirectoryError, PermissionError):  # which of both depends on the system
                _remove_tree(below, entry)
    os.rmdir(name, dir_fd=folder)


def _take_lock(descriptor: int, path: Path) -> None:
    """Lock an open folder, which takes other runs an instant; DiskError that names who has held it
    for LOCK_LIMIT.
    """
    begin = time.monotonic()
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - begin
        if waited > LOCK_LIMIT:
            raise DiskError(
                f"nvme_path: {path} has been locked for {waited:.0f} s by {_holder(descriptor)}; "
                "end that process, or "
                "set nvme_path to another folder",
                str(path),
            )
        if waited > LOCK_LIMIT / 6 and not told:
            told = True
            log.warning(
                "waiting for the lock of %s, which is held by %s", path, _holder(descriptor)
            )
        time.sleep(0.02)


def _holder(descriptor: int) -> str:
    """The process that has an open file locked, as far as the system tells."""
    found = os.fstat(descriptor)
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            # "1: FLOCK ADVISORY WRITE 4711 00:1f:1234 0 EOF"; waiting ones have "->"
            words = line.split()
            if len(words) > 5 and words[1] == "FLOCK" and words[5] == place:
                name = ""
                with contextlib.suppress(OSError):
                    name = f" ({Path('/proc', words[4], 'comm').read_text().strip()})"
                return f"process {words[4]}{name}"
    return "another process"
