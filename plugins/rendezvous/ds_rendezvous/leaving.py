"""How a process leaves a job that it met (torch-free)."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

LOOK_SECONDS = 0.01
MOST_SECONDS = 1.0


def settle() -> None:
    """Wait until gloo's threads have nothing to do any more; for the exit of a process, while
    Python still runs.

    [Note: exit] A collective returns a moment before the thread that made it lets its tensors go.
    That takes Python's lock, which no thread gets once the interpreter ends: pthread_exit then
    unwinds the thread through a C++ destructor, and the process aborts ("terminate called without
    an active exception").
    """
    before = [""]
    end = time.monotonic() + MOST_SECONDS
    while ((now := _threads()) != before or "R" in now) and time.monotonic() < end:
        before = now
        time.sleep(LOOK_SECONDS)  # a thread that waits for Python's lock gets it


def _threads() -> list[str]:
    """Those of gloo: how often each has slept, "R" for one that does not.

    Nothing where the system does not tell.
    """
    found = []
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            if (task / "comm").read_text().startswith("pt_gloo_runloop"):
                words = map(str.split, (task / "status").read_text().splitlines())
                state = {line[0]: line[1] for line in words if len(line) > 1}
                found.append(
                    "R"
                    if state["State:"] == "R"
                    else f"{task.name} {state['voluntary_ctxt_switches:']}"
                )
    return found
