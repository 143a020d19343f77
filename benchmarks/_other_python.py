"""A contestant in a process of its own, in another environment: it is told what to do line by line,
and answers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence

__all__ = ["answer", "orders", "other_python"]

MARK = "> "
"""Begins the lines that are answers; a package may print others."""


def other_python(python: str, script: str, arguments: Sequence[str]) -> Callable[[str], str]:
    """Start `script` by the interpreter `python`, without accelerators, and wait for its first
    answer.

    What comes back gives it an order and waits for the answer. SystemExit where the process ends
    before.
    """
    process = subprocess.Popen(
        [python, script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )
    into = process.stdin
    out = process.stdout
    assert into is not None and out is not None

    def heard() -> str:
        found = next((line for line in out if line.startswith(MARK)), None)
        if found is None:
            raise SystemExit(f"{python} {script} has ended with status {process.wait()}")
        return found.removeprefix(MARK).strip()

    def ask(order: str) -> str:
        print(order, file=into, flush=True)
        return heard()

    heard()
    return ask


def orders() -> Iterator[str]:
    """In the other process: say that it is ready; then each order, until there are no more."""
    answer("ready")
    for line in sys.stdin:
        yield line.strip()


def answer(text: object) -> None:
    """In the other process: the answer to the last order."""
    print(f"{MARK}{text}", flush=True)
