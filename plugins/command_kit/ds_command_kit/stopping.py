"""Signals that stop a run, and the exit code of one that saved first (standard library)."""

from __future__ import annotations

import signal

PREEMPTED = 75
"""Exit code of ranks that saved a checkpoint because one of them was told to stop: EX_TEMPFAIL of
sysexits.h.
"""

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask a launcher to stop its run."""

SAVED = f"exit code {PREEMPTED}: a checkpoint was saved first, and the same command resumes from it"


def heeded() -> tuple[signal.Signals, ...]:
    """Of `STOPS` those that were not ignored when this process was started, or are not now.

    ``nohup`` ignores a hang-up, and a shell lets the background jobs of a script ignore Ctrl-C.
    """
    return tuple(number for number in STOPS if signal.getsignal(number) is not signal.SIG_IGN)
