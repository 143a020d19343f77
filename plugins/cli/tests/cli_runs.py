"""Scripts, and runs of them by ``dscore run``, for the tests of the command."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ds_cli.plugin import ds_commands
from ds_command_kit.app import make_app
from ds_testing import processes
from typer.testing import CliRunner

from ds_core.plugins import BACKENDS, Found

ROOT = Path(__file__).parents[3]
LEAVE_PID = """
import json, os, signal, subprocess, sys, time
from pathlib import Path
HERE, RANK = Path(__file__).parent, int(os.environ["RANK"])
def leave(name, pid):
    (HERE / "new").with_suffix(f".{name}{RANK}").write_text(str(pid))
    (HERE / "new").with_suffix(f".{name}{RANK}").rename(HERE / f"{name}{RANK}.pid")
def wait_for(*names):
    while not all((HERE / f"{n}.pid").exists() for n in names):
        time.sleep(0.01)
leave("rank", os.getpid())
"""
CHILD = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', "
    "flush=True); time.sleep(600)"
)
IN_BACKGROUND = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
STUBBORN = f"""
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE)
child.stdout.readline()
leave("child", child.pid)
"""


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has collected yet has ended too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def pids(folder: Path) -> dict[str, int]:
    return {file.stem: int(file.read_text()) for file in folder.glob("*.pid")}


def wait_until(what: Any, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def command(
    tmp_path: Path, *words: str, cwd: Path | None = None, background: bool = False
) -> subprocess.Popen[str]:
    """``dscore run`` in a process of its own, as the console script would start it."""
    entry = tmp_path / "entry"
    entry.mkdir(exist_ok=True)
    (entry / "dscore").write_text("from ds_cli import main\nmain()\n")
    with processes.disposed(ignored=background, signals=IN_BACKGROUND):
        return subprocess.Popen(
            [sys.executable, str(entry / "dscore"), "run", *words],
            cwd=cwd or tmp_path,
            env=processes.clean_environment(PYTHONPATH=str(ROOT), TMPDIR=str(tmp_path)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def dscore(*words: str) -> Any:
    """``dscore WORDS`` in this process."""
    return CliRunner().invoke(make_app(ds_commands()), list(words), prog_name="dscore")


def missing(name: str = "bad", group: str = BACKENDS) -> Found:
    """A plugin whose module is not there."""
    return Found(name, group, "no_such_module_bad", "ds-bad", "0.1")
