"""How a run stands: running, finished, failed, or dead without a word."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ds_report.reading import RankRecord, number


class State(Enum):
    """How a run stands."""

    RUNNING = "running"
    FINISHED = "finished"
    ENDED = "ended"
    FAILED = "failed"
    DIED = "died"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a run, and what there is to say of it, in one sentence or ""."""

    state: State
    text: str = ""


def gave_no_sign(now: Mapping[str, Any], clock: float) -> bool:
    """Whether the process that wrote `now` is gone: its id, where it ran here, or its silence
    tells.

    clock: seconds since 1970.
    """
    age = clock - number(now.get("time"))
    every = max(number(now.get("seconds")), 0.1)
    if not age < 10 * every + 10:  # NaN too
        return True
    pid = now.get("pid")
    if (
        age > 2 * every + 1
        and now.get("host") == socket.gethostname()[:64]
        and type(pid) is int
        and pid > 0
    ):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except OSError:  # it belongs to another user, so it is alive
            pass
    return False


def standing(
    ranks: Iterable[RankRecord], now: Mapping[int, Mapping[str, Any]], clock: float | None = None
) -> Standing:
    """The state of a run.

    now: rank -> what it is doing.
    """
    ranks = list(ranks)
    clock = time.time() if clock is None else clock
    if not ranks:
        return Standing(State.UNKNOWN)
    if failed := sorted((r for r in ranks if r.last == "failed"), key=lambda r: r.ended):
        first = failed[0]
        return Standing(
            State.FAILED,
            f"rank {first.rank}: {first.error}" if first.error else f"rank {first.rank}",
        )
    silent = [
        r.rank for r in ranks if r.last == "running" and gave_no_sign(now.get(r.rank, {}), clock)
    ]
    if silent:
        since = max(number(now.get(rank, {}).get("time")) for rank in silent)
        who = (
            f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent[:8]))}"
        )
        try:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
        except (ValueError, OverflowError, OSError):  # no time, or of no year that the system knows
            when = "its start"
        return Standing(State.DIED, f"{who} ended without a word; last sign at {when}")
    if any(r.last == "running" for r in ranks):
        return Standing(State.RUNNING)
    return Standing(State.FINISHED if all(r.last == "finished" for r in ranks) else State.ENDED)
