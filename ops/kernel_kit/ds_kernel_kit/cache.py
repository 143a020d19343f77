"""The folder of built kernels: who may have written what is loaded from there (torch-free).

[Note: who could have written it] Loading a library runs its code, so it must not be another user's.
Three things are checked: every folder on the way can be changed by this user and root alone;
``ops`` itself is this user's with mode 0700; and the file, once it is open, is a regular file of
this user that no other user may write to. A folder that was open to others once may hold their
files, so the advice is to remove it, never to change its mode.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ds_core.errors import KernelError

_HERE = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def cache_folder(*, make: bool = True) -> Path:
    """The folder of finished libraries: ``$DS_CORE_CACHE/ops``, by default in ~/.cache; made when
    it is not there.

    The path has no links in it. make=False: only what is there is looked at. Raises KernelError
    when anyone else could change what is in it.
    """
    root = os.environ.get("DS_CORE_CACHE")
    base = (
        Path(root)
        if root
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_core"
    )
    base = Path(os.path.abspath(base))
    folder = base.parent.resolve() / base.name / "ops"
    try:
        if make:
            base.mkdir(parents=True, exist_ok=True, mode=0o700)
        # From the root on: a user who can rename a folder of the path can replace all below it.
        for parent in reversed(folder.parents):
            _check(parent, _status(parent), folder)
        if make:
            folder.mkdir(exist_ok=True, mode=0o700)
        found = _status(folder)
    except OSError as error:
        if not make and isinstance(error, FileNotFoundError):
            return folder
        raise KernelError(
            f"the folder for built kernels cannot be made: {error}; set DS_CORE_CACHE to a folder "
            "that you can write to"
        ) from error
    if (
        not stat.S_ISDIR(found.st_mode)
        or found.st_uid != os.geteuid()
        or stat.S_IMODE(found.st_mode) & 0o077
    ):
        raise _refusal(
            folder, folder, found, f"it must be a folder of user {os.geteuid()} with mode 0700"
        )
    return folder


def open_own(path: Path, flags: int) -> int:
    """A descriptor of a regular file of this user that no other user may write to.

    Raises KernelError for any other file, OSError when there is none.
    """
    try:
        # Opened first, then looked at: what was checked by name could be exchanged before it is
        # opened.
        descriptor = os.open(path, flags | _HERE, 0o600)
    except OSError:
        if path.is_symlink() or path.is_dir():
            kind = "link" if path.is_symlink() else "folder"
            raise KernelError(f"{path} is a {kind} where a file is to be; remove it") from None
        raise
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return descriptor
    os.close(descriptor)
    raise KernelError(
        f"{path} is {'a file' if stat.S_ISREG(found.st_mode) else 'no file'} of user "
        f"{found.st_uid} with mode "
        f"{stat.S_IMODE(found.st_mode):04o}, where only a file of user {os.geteuid()} that no "
        "other user may write to "
        "is trusted; remove it"
    )


@contextlib.contextmanager
def _closing(descriptor: int) -> Iterator[int]:
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def read_own(path: Path) -> bytes:
    """The content of such a file; see `open_own`."""
    with (
        _closing(open_own(path, os.O_RDONLY)) as descriptor,
        open(descriptor, "rb", closefd=False) as file,
    ):
        return file.read()


def _status(path: Path) -> os.stat_result:
    """Of what is at `path` itself, by a descriptor of it where it is a folder."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return found
    # O_PATH (Linux) needs no right to read the folder, such as a /home that can only be passed
    # through.
    with _closing(
        os.open(path, _HERE | os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY))
    ) as descriptor:
        return os.fstat(descriptor)


def _check(parent: Path, found: os.stat_result, folder: Path) -> None:
    """KernelError unless only this user and root can change what names in `parent` refer to."""
    if not stat.S_ISDIR(found.st_mode):
        raise _refusal(folder, parent, found, "it must be a folder, and no link to one")
    if found.st_uid not in (0, os.geteuid()):
        raise _refusal(folder, parent, found, "the owner could put another folder in its place")
    others = found.st_mode & (0o002 if _is_private(found.st_gid) else 0o022)
    # as in /tmp: names belong to those who made them
    if others and not found.st_mode & stat.S_ISVTX:
        raise _refusal(folder, parent, found, "other users could put another folder in its place")


def _is_private(gid: int) -> bool:
    """Whether a group is this user's alone, as many systems make one for each user (with umask
    002).
    """
    import grp
    import pwd

    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(gid)
        return (
            user.pw_gid == gid
            and group.gr_name == user.pw_name
            and set(group.gr_mem) <= {user.pw_name}
        )
    return False


def _refusal(folder: Path, which: Path, found: os.stat_result, why: str) -> KernelError:
    kind = "a link" if stat.S_ISLNK(found.st_mode) else f"mode {stat.S_IMODE(found.st_mode):04o}"
    fix = (
        "remove it (it is only a cache, and may hold files of others)"
        if which == folder
        else "move the cache"
    )
    return KernelError(
        f"kernels are not built in {folder}, or loaded from there, because of {which} (owner "
        f"{found.st_uid}, {kind}): "
        f"{why}; {fix}, or set DS_CORE_CACHE to a folder that only you can write to"
    )
