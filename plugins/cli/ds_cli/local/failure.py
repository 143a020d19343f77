"""Which process failed first, and saying so plainly."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ds_command_kit.stopping import PREEMPTED, SAVED

from ds_cli.local.process_monitor import Ending, Started

# What a rank writes whose peer has gone; users need to see the peer's own failure.
_LOST_PEER = re.compile(
    r"connection (closed|reset)|closed by peer|broken pipe|remote process exited|ncclremoteerror|a "
    r"peer failed"
    r"|LostRankError: ",
    re.IGNORECASE,
)
_ENDED = (-signal.SIGTERM, -signal.SIGKILL)  # how the launcher ends a process
_HINTS = {
    "SIGKILL": "only the system or a person sends this; mostly the machine ran out of memory (see "
    "dmesg)",
    "SIGSEGV": "a crash in compiled code; its Python stack is above",
    "SIGBUS": "mostly shared memory is full (see `dscore doctor`)",
    "SIGABRT": "compiled code gave up; its own words are above",
    "SIGILL": "compiled code for another processor",
}


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """A process that failed by itself."""

    rank: int
    pid: int
    code: int
    """Exit code, or -n for signal n."""
    time: float
    """Monotonic seconds; infinite when its end was not seen."""
    error: str
    """The exception in one line, or ""."""
    traceback: str
    """As Python would print it, or "" when the process printed it itself."""
    host: str = ""
    """Where it ran; "" for this host."""

    def at(self, host: str) -> WorkerFailure:
        """The same, for others to read."""
        return dataclasses.replace(self, host=host)


def gather(
    folder: Path,
    attempt: int,
    endings: Mapping[Started, Ending],
    known: Iterable[tuple[int, int, int, int]] = (),
    grace: float = 0.0,
) -> tuple[list[WorkerFailure], int]:
    """The failures of one attempt in order of time, and how many processes were ended because of
    them.

    known: (rank, local rank, pid, code) that the launcher knows of besides `endings`.
    grace: seconds between the first failure and the launcher's own SIGKILL; who had one sooner was
        killed by somebody else.
    """
    rows = [
        _failure(folder, attempt, one.local_rank, one.rank, one.pid, ending.code, ending.time)
        for one, ending in endings.items()
        if one.attempt == attempt and ending.code != 0
    ]
    seen = {row.rank for row in rows}
    rows += [
        _failure(folder, attempt, local, rank, pid, code, float("inf"))
        for rank, local, pid, code in known
        if rank not in seen
    ]
    rows.sort(key=lambda row: (row.time, row.rank))
    # half, since the launcher notices the first one late
    killed = rows[0].time + grace / 2 if rows else 0.0
    own = [
        row
        for at, row in enumerate(rows)
        if at == 0 or row.code not in _ENDED or (row.code == -signal.SIGKILL and row.time < killed)
    ]
    return own, len(rows) - len(own)


def _failure(
    folder: Path, attempt: int, local_rank: int, rank: int, pid: int, code: int, ended: float
) -> WorkerFailure:
    try:
        word = json.loads((folder / f"{attempt}-{local_rank}.error").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it died without a word
        return WorkerFailure(rank, pid, code, ended, "", "")
    if code < 0:  # after its word, while Python was shutting down
        code = word["code"]
    return WorkerFailure(
        rank, pid, code, min(ended, word["time"]), word["error"], word["traceback"]
    )


def is_echo(failure: WorkerFailure) -> bool:
    """Whether a process failed because a peer had gone."""
    return bool(_LOST_PEER.search(failure.error))


def first(failures: list[WorkerFailure]) -> WorkerFailure:
    """The failure to show: the earliest that is not a mere echo of a lost peer."""
    return next((row for row in failures if not is_echo(row)), failures[0])


def exit_code(failure: WorkerFailure) -> int:
    """What a shell would say: the exit code, or 128 + the signal."""
    return failure.code if failure.code > 0 else 128 - failure.code


def describe(
    failures: list[WorkerFailure], ended: int, world_size: int, *, root: WorkerFailure | None = None
) -> str:
    """The whole message: the traceback of the first failure, or of `root`, once, then one line for
    each rank.
    """
    root = root or first(failures)
    if root.code == PREEMPTED:
        return f"dscore: rank {root.rank} of {world_size} ended with {SAVED}"
    name = signal_name(-root.code)
    failed = (
        f"failed with exit code {root.code}"
        if root.code > 0
        else f"was killed by {name} (signal {-root.code})"
    )
    if root.code == -signal.SIGSTOP:
        failed = "was stopped (SIGSTOP)"
    why = _head(root.error) or (_HINTS.get(name, "") if root.code < 0 else "")
    lines = [root.traceback] if root.traceback else []
    lines.append(
        f"dscore: rank {root.rank} of {world_size} {failed}{' first' if len(failures) > 1 else ''}"
        f" (pid {root.pid} on {root.host or socket.gethostname()}){': ' if why else ''}{why}"
    )
    for row in failures:
        if row is not root:
            code = f"exit code {row.code}" if row.code > 0 else signal_name(-row.code)
            lines.append(f"dscore: rank {row.rank} too: {_head(row.error) or code}")
    if ended:
        lines.append(
            f"dscore: the other {'process was' if ended == 1 else f'{ended} processes were'} ended"
        )
    return "\n".join(lines)


def _head(text: str) -> str:
    return (text.splitlines() or [""])[0][:300]


def signal_name(number: int) -> str:
    """``SIGKILL`` for 9; ``signal 99`` for a number that has no name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
