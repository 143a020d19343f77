"""What tests want of the operating system: processes in a clean environment, a free port, files
that are full.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

LAUNCHERS = ("MASTER_", "TORCHELASTIC", "OMPI_", "SLURM_", "PMI")


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without what would let a checkout, a launcher or a choice of ours
    leak in.
    """
    leaks = ("PYTHON", "VIRTUAL_ENV", "DS_", "COV_", *LAUNCHERS)
    exact = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(leaks) and k not in exact}
    return kept | {"OMP_NUM_THREADS": "1", "COLUMNS": "400", "NO_COLOR": "1"} | extra


def run(
    command: list[str],
    *,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
    status: int = 0,
    timeout: int = 120,
) -> str:
    """Run and give back stdout and stderr together; the exit status must be `status` (-1: any but
    0).
    """
    done = subprocess.run(
        command,
        cwd=cwd,
        check=False,
        env=clean_environment() if env is None else env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert (done.returncode != 0) if status == -1 else (done.returncode == status), done.stdout
    return done.stdout


def start(code: str, **variables: str) -> subprocess.Popen[str]:
    """Run `code` in a Python of its own, where warnings are errors; `output` waits for it.

    variables: of the environment, besides those of `clean_environment`.
    """
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", code],
        env=clean_environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output(process: subprocess.Popen[str], timeout: float = 300.0) -> str:
    """What a process that `start` began has printed, once it has ended; AssertionError where it
    failed.
    """
    text, _ = process.communicate(timeout=timeout)
    assert process.returncode == 0, text
    return text.strip()


@contextmanager
def disposed(
    *, ignored: bool, signals: Sequence[signal.Signals] = (signal.SIGINT,)
) -> Iterator[None]:
    """Processes that are started inside ignore `signals`, as in a shell's background, or have their
    default.

    In the main thread. Tests that send Ctrl-C want the default: who runs the tests may be in the
    background.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt  # a new program has the default where its parent has a handler

    before = {
        number: signal.signal(number, signal.SIG_IGN if ignored else handler) for number in signals
    }
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def free_port() -> int:
    """A port of the loopback address on which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """Inside, every file of this process is full at `size` bytes: a write beyond is cut short, the
    next one fails.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
