"""A process from outside: its host and number, what the system says of it, and the line that its
program is at.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback
from collections.abc import Collection, Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from ds_comm_gloo import host_key

import ds_core

_CORE = os.path.dirname(os.path.abspath(ds_core.__file__)) + os.sep


class State(NamedTuple):
    """What the system says of a process that does not answer.

    settled: it cannot answer.
    """

    text: str
    settled: bool = False


class Home(NamedTuple):
    """A process.

    machine: equal for processes that see each other's numbers.
    born: tells it from a later one.
    """

    host: str
    machine: str
    pid: int
    born: str

    @classmethod
    def here(cls) -> Home:
        """This process."""
        pid = os.getpid()
        return cls(
            socket.gethostname(),
            host_key(unknown=socket.gethostname()),
            pid,
            (_stat(pid) or ("", ""))[1],
        )

    @classmethod
    def read(cls, fields: Any) -> Home:
        """The reverse of a trip through JSON."""
        host, machine, pid, born = fields
        return cls(str(host), str(machine), int(pid), str(born))

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"

    def state(self) -> State:
        """What the system says, on the process's machine."""
        found = _stat(self.pid)
        if found is None or found[1] != self.born or found[0] in "ZX":
            return State("has ended: its process is gone", True)
        if found[0] in "Tt":
            text = (
                f"is stopped (by SIGSTOP, Ctrl-Z or a debugger; `kill -CONT {self.pid}` resumes it)"
            )
            return State(text, True)
        if found[0] == "D":
            return State("waits in the kernel, for a disk or a device (state D)")
        return State(
            "runs, but has not answered: it makes other collectives, or a call holds Python's "
            "interpreter"
        )


def _stat(pid: int) -> tuple[str, str] | None:
    """(state, start time) of a process; None: there is none.

    Without /proc only whether it is there is known.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except OSError:
        if os.path.isdir("/proc/self"):
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "S", ""


def main_stack() -> Iterator[FrameType]:
    """The frames of the main thread, innermost first."""
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    return (frame for frame, _ in traceback.walk_stack(main)) if main is not None else iter(())


def user_line(packages: Collection[str]) -> str:
    """The user's line that the main thread is at ("train.py:30 in load"); "" where there is none.

    packages: top-level names of modules whose lines are not the user's.
    """
    for frame in main_stack():
        if _users(frame) and str(frame.f_globals.get("__name__")).split(".")[0] not in packages:
            function = frame.f_code.co_name
            where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            return where if function.startswith("<") else f"{where} in {function}"
    return ""


def torch_call(trace: TracebackType | None) -> str:
    """The function of torch.distributed in which an error was raised, and the line that called it;
    "" for another.
    """
    calls = traceback.extract_tb(trace)
    folder = f"{os.sep}torch{os.sep}distributed{os.sep}"
    outside = [call for call in calls if folder not in call.filename]
    if not outside or folder not in calls[-1].filename:
        return ""
    where = f"{os.path.basename(outside[-1].filename)}:{outside[-1].lineno}"
    return f"torch.distributed.{calls[-1].name}, at {where}"


def _users(frame: FrameType) -> bool:
    """Whether a frame is outside the core, installed packages and Python's own library."""
    name = frame.f_code.co_filename
    return not (
        name.startswith((_CORE, "<"))
        or f"{os.sep}site-packages{os.sep}" in name
        or f"{os.sep}lib{os.sep}python" in name
    )
