"""A host's folder in memory: whose it is, that nobody else can write into it, and its end.

Its name has the process that it belongs to: the launcher, which outlives the ranks that it starts
again, or without one the rank itself. So runs never meet in one folder, and a folder whose process
has gone is known as left behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

from ds_checkpoint_peer import guard
from ds_core.errors import CheckpointError

RESTARTED = "TORCHELASTIC_RESTART_COUNT"
"""A variable that launchers set which start ranks again."""

_PREFIX = "dscore-peer"
_NAME = re.compile(
    rf"{_PREFIX}-(?P<uid>\d+)-(?P<space>\d+)-(?P<pid>\d+)-(?P<start>\d+)-[0-9a-f]{{16}}", re.ASCII
)


def room_of(memory: Path, folder: str) -> Path:
    """The path of this host's folder in `memory` for the checkpoints of `folder`."""
    pid = os.getppid() if RESTARTED in os.environ else os.getpid()
    start = guard.started(pid) or 0
    # Hosts that are simulated on one machine have names of their own.
    told = "\0".join((str(Path(folder).absolute()), socket.gethostname()))
    digest = hashlib.blake2b(told.encode(), digest_size=8).hexdigest()
    return memory / f"{_PREFIX}-{os.geteuid()}-{_process_space()}-{pid}-{start}-{digest}"


def enter(room: Path) -> None:
    """Make `room`, or take the one of before the restart, and have it removed when its process ends.

    CheckpointError where it cannot be made, or others could have written into it.
    """
    clear(room.parent)
    try:
        with contextlib.suppress(FileExistsError):
            room.mkdir(mode=0o700)
        check(room)
        # Its own session, so that it outlives the ranks.
        subprocess.run(
            [sys.executable, "-I", "-S", guard.__file__, _owner(room), str(room)],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise CheckpointError(f"{room} cannot be made: {error.strerror or error}") from error


def check(room: Path) -> None:
    """CheckpointError unless `room` is a directory of this user that nobody else may enter."""
    try:
        handle = os.open(room, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{room} cannot be used: {error.strerror or error}") from error
    status = os.fstat(handle)
    os.close(handle)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise CheckpointError(
            f"{room} belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}; "
            "others could have put files there"
        )


def clear(memory: Path) -> None:
    """Remove the folders of this user whose processes have ended, with all that watched them."""
    with contextlib.suppress(OSError):
        for path in memory.glob(f"{_PREFIX}-{os.geteuid()}-{_process_space()}-*"):
            found = _NAME.fullmatch(path.name)
            if found is None or guard.started(int(found["pid"])) == int(found["start"]):
                continue
            # One that is not ours is left alone.
            with contextlib.suppress(CheckpointError):
                check(path)
                shutil.rmtree(path, ignore_errors=True)


def leave(room: Path) -> None:
    """Remove `room`; its guard then ends too."""
    shutil.rmtree(room, ignore_errors=True)


def _owner(room: Path) -> str:
    found = _NAME.fullmatch(room.name)
    assert found is not None, room
    return f"{found['pid']}-{found['start']}"


def _process_space() -> int:
    """What numbers of processes mean: containers that share memory may not share it."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0
