"""The last failure of ``dscore run`` on this machine, kept for ``dscore doctor --report``
(torch-free).
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from ds_cli.doctor.cleaning import clean

LONGEST = 200_000


def keep(text: str, command: str) -> None:
    """Write what ``dscore run`` said of a failure, without secrets; where that fails, nothing is
    said.
    """
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    # no home, or a full disk: the failure itself matters more
    with contextlib.suppress(OSError, RuntimeError):
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = file.with_suffix(f".{os.getpid()}")
        with open(
            os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "w"
        ) as stream:
            stream.write(clean(f"{when}\n$ dscore run {command}\n{text[-LONGEST:]}\n"))
        os.replace(fresh, file)


def kept() -> str:
    """What was kept last; "" when nothing was."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        file = _file()
        if file.stat().st_uid == os.geteuid():
            return file.read_text(errors="replace")
    return ""


def _file() -> Path:
    root = os.environ.get("DS_CORE_CACHE")
    base = (
        Path(root)
        if root
        else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds_core"
    )
    return base / "last_failure.txt"
