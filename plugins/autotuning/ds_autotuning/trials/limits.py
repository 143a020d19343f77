"""A memory limit for this process and those that it starts, and a process that ends when its parent
does.

Run by its path, as ``python limits.py BYTES PARENT COMMAND [ARGS...]``: it becomes the command.
Standard library only.

[Note: RLIMIT_DATA] It counts private writable memory, so an allocation too many fails in the
program that asks for it, as an error with a place, instead of the system killing whoever is
largest. RLIMIT_AS would count address space too, of which drivers of accelerators reserve many
times what they use.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def limit_memory(size: int) -> bool:
    """Let this process, and each that it starts from now on, have at most `size` bytes of memory;
    False: cannot.
    """
    if not sys.platform.startswith("linux"):
        return False
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        size = min(size, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_DATA, (size, hard))
        return True
    return False


def _end_with(parent: int) -> None:
    """Be interrupted when the parent dies, however it dies; Linux alone can."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    PR_SET_PDEATHSIG = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
    if os.getppid() != parent:  # it has died already
        sys.exit(1)


def main() -> None:
    """Set what was asked for and become the command."""
    size, parent, *command = sys.argv[1:]
    # The tuner ends a trial by SIGINT, also where it ignores that itself: in the background of a
    # script.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _end_with(int(parent))
    if int(size):
        limit_memory(int(size))
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
