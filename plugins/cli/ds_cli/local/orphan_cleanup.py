"""Kills what a run started when its launcher was killed (SIGKILL) and could not do so itself.

Run by its path, as ``python orphan_cleanup.py FOLDER GRACE [FILES...]``, with a pipe from the
launcher as its standard input: a byte says that the launcher has ended in order, the end of the pipe that it
was killed. Standard library only. A process that leads a session is killed with all that it
started; the launcher does the same while it lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def starts(folder: Path) -> Iterator[tuple[Path, dict[str, int]]]:
    """The notes that processes left as they began, with their files."""
    for path in sorted(folder.glob("*.start")):
        with contextlib.suppress(OSError, ValueError):  # removed meanwhile
            yield path, json.loads(path.read_text())


def kill_session(session: int) -> None:
    """Kill every process of `session`, which one of our processes leads; again until none is left
    (forks race).
    """
    if session in (os.getsid(0), 0):
        return
    for _ in range(50):
        pids = members(session)
        for pid in pids:
            _quietly(os.kill, pid)
        if not pids:
            return
        time.sleep(0.02)


def members(session: int) -> list[int]:
    """The living processes of `session`; without /proc the group of its leader is all that can be
    reached.
    """
    found = []
    if not os.path.exists("/proc/self/stat"):
        _quietly(os.killpg, session)
        return []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            # "pid (name) state ppid pgrp session ...": the name may hold anything, also parentheses
            state, _, _, owner = (
                Path("/proc", name, "stat").read_text().rpartition(")")[2].split()[:4]
            )
        except (OSError, ValueError):  # ended while we looked
            continue
        if int(owner) == session and state not in "ZX":
            found.append(int(name))
    return found


def _quietly(kill: Callable[[int, int], None], target: int) -> None:
    # it has ended, or its number belongs to another user's process now
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(target, signal.SIGKILL)


def main() -> None:
    """Wait for the launcher's end; after a kill, give the ranks `GRACE` seconds, then end all and
    clean up.
    """
    folder, grace, *files = sys.argv[1:]
    if sys.stdin.buffer.read(1):
        return
    end = time.monotonic() + float(grace)
    # The ranks were notified by the system (PR_SET_PDEATHSIG) and may be saving something.
    while time.monotonic() < end and any(
        note["pid"] in members(note["session"]) for _, note in starts(Path(folder))
    ):
        time.sleep(0.05)
    for _, note in starts(Path(folder)):
        kill_session(note["session"])
    shutil.rmtree(folder, ignore_errors=True)
    for file in files:
        with contextlib.suppress(OSError):
            os.unlink(file)


if __name__ == "__main__":
    main()
