"""Removes a host's folder in memory when the process that it belongs to has ended.

Run by its path, as ``python guard.py PID-START FOLDER``. Standard library only. It watches and does
nothing else; a second one for the same folder ends at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import time
from pathlib import Path

LOOK_SECONDS = 0.5
LOCK = ".guard"


def started(pid: int) -> int | None:
    """When process `pid` has started, in the system's ticks; None where there is none.

    A number is given again to another process, which has started at another time.
    """
    try:
        # "pid (name) state ppid ...": the name may hold anything, also parentheses
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A process that has ended waits for its parent.
    return None if fields[0] in "ZX" else int(fields[19])


def main() -> None:
    """Wait for the end of the process, or of the folder."""
    owner, folder = sys.argv[1:]
    pid, start = map(int, owner.split("-"))
    try:
        handle = os.open(os.path.join(folder, LOCK), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # it has gone, or has a guard
        return
    # Whoever has started this goes on; the child keeps the lock.
    if os.fork():
        return
    while started(pid) == start and os.path.isdir(folder):
        time.sleep(LOOK_SECONDS)
    # A rank that is about to be ended may still write.
    for _ in range(3):
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
        time.sleep(LOOK_SECONDS)


if __name__ == "__main__":
    main()
