"""One job at a time saves into a folder: an operating system's lock on its file ``.lock``
(torch-free).

Two jobs would clear each other's half-written checkpoints away. The lock is this process's, so that
several engines of one job may share a folder, and it ends with the process, however that ends.
Where storage has no locks there is none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import time
import weakref
from pathlib import Path

from ds_core.errors import CheckpointError

log = logging.getLogger("ds_checkpoint")

LOCK = ".lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """Holds folders from `take` to `close`, or until it is no longer referred to."""

    def __init__(self) -> None:
        self._held: dict[Path, int] = {}
        weakref.finalize(self, _close, self._held)

    def take(self, folder: Path) -> None:
        """Hold `folder`, which exists; CheckpointError naming who has it when that is another
        job."""
        folder = folder.resolve()
        path = folder / LOCK
        descriptor = self._held.pop(folder, None)
        # the folder was removed and created again
        if descriptor is not None and not _is_at(descriptor, path):
            os.close(descriptor)
            descriptor = None
        fresh = descriptor is None
        if descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o666)
        try:
            # A record lock: unlike flock's it is not shared with children, which may live on when
            # this process ends. Any close of the file in this process ends it (another engine's,
            # say), so it is asked for at each save.
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(descriptor, 200).decode(errors="replace").strip()
            os.close(descriptor)
            if error.errno not in _TAKEN:
                log.debug(
                    "%s cannot be locked (%s); give each job a separate folder", folder, error
                )
                return
            raise CheckpointError(
                f"another job is saving into {folder} ({owner or 'it has not said which'}); give "
                "each job a separate save_dir, or end the other job"
            ) from None
        self._held[folder] = descriptor
        if not fresh:
            return
        with contextlib.suppress(OSError):  # for people only
            text = (
                f"host {socket.gethostname()}, process {os.getpid()}, since "
                f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n"
            )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, text.encode(), 0)

    def close(self) -> None:
        """Give all folders back."""
        _close(self._held)


def _close(held: dict[Path, int]) -> None:
    while held:
        os.close(held.popitem()[1])


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except OSError:
        return False
