"""The processes of one trial: started with a mark in their environment, and ended to the last one
by that mark.

[Note: a mark] Ranks lead sessions of their own, and what they start may outlive them, so neither a
process group nor a parent tells who belongs to a trial. The environment is inherited by all, and
also tells a later tuner what an earlier one, which was killed, has left behind. Without /proc the
launcher's own group is all that can be reached.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ds_autotuning.trials import limits

MARK = "DS_AUTOTUNING_TRIAL"
GRACE = 15.0
"""Seconds that the launcher gets to end its ranks, here and on other hosts, before all that is here
is killed.
"""


class Ended(NamedTuple):
    """How a process ended.

    code: as in subprocess.
    took: seconds.
    in_time: False if the limit ended it.
    """

    code: int
    took: float
    in_time: bool


def run_limited(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    seconds: float,
    memory: int = 0,
) -> Ended:
    """Run `command`, its output to ``folder/log``, until it ends or `seconds` have passed; then
    nothing of it is left.

    memory: most bytes of each process on this host, 0: no limit. An exception, such as
    KeyboardInterrupt, ends it too.
    """
    mark = str(folder)
    begin = time.monotonic()
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", limits.__file__, str(memory), str(os.getpid()), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, MARK: mark},
            start_new_session=True,
        )
        in_time = True
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            if process.poll() is None:
                _ask(process)
            end_all(mark)
            process.wait()
    return Ended(process.returncode, time.monotonic() - begin, in_time)


def _ask(process: subprocess.Popen[bytes]) -> None:
    """The launcher ends its ranks in order; where it does not, it is killed."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def end_all(mark: str) -> int:
    """Kill every process here whose environment has `mark`; again until none is left.

    Gives how many there were.
    """
    found: set[int] = set()
    for _ in range(100):
        pids = _marked(mark)
        if not pids:
            break
        found |= set(pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return len(found)


def _marked(mark: str) -> list[int]:
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        if pid == os.getpid():
            continue
        try:
            marked = wanted in (entry / "environ").read_bytes().split(b"\0")
            dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        except OSError:  # it has ended meanwhile, or belongs to another user
            continue
        if marked and not dead:
            found.append(pid)
    return found
