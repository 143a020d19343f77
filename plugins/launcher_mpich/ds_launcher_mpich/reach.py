# Hydra's first word is ssh's -x (no X11). Python takes it too: it leaves out a file's first line,
# which is this one.
"""Runs ssh for Hydra and says on stderr when it ends badly: ``python reach.py [OPTIONS...] HOST
COMMAND...``.

Standard library only: it runs once per host. It ends when Hydra does, and ssh with it.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys

WITH_VALUE = frozenset("BbcDEeFIiJLlmOoPpQRSWw")  # options of ssh, as its manual lists them


def host_of(words: list[str]) -> str:
    """The host among the words for ssh."""
    rest = iter(words)
    for word in rest:
        if not word.startswith("-"):
            return word
        if word[-1] in WITH_VALUE:
            next(rest, None)
    return "?"


def main() -> None:
    """Run ssh; end as it does."""
    _end_with_parent()
    words = sys.argv[1:]
    code = subprocess.call(["ssh", "-x", *words], preexec_fn=_end_with_parent)
    if code != 0:
        print(
            f"reach: ssh to {host_of(words)} ended with {code if code > 0 else 128 - code}",
            file=sys.stderr,
        )
    sys.exit(code if code > 0 else 128 - code if code else 0)


def _end_with_parent() -> None:
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()
