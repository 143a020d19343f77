"""A plugin of pytest that writes the CPU seconds of each test, worker processes included.

``PYTHONPATH=tests python -m pytest -p cpu_times --cpu-times times.json``. A process that a test
starts counts for it; so does the work that the processes of the fixture `ranks` do while it runs.
Import and collection are the row "".
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

TICKS = os.sysconf("SC_CLK_TCK")


def tree_seconds(root: int, proc: Path = Path("/proc")) -> float:
    """CPU seconds of process `root` and of all below it, ended ones included."""
    children: dict[int, list[int]] = {}
    used: dict[int, int] = {}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            # The process ended since the folder was listed.
            continue
        # The name, in brackets, may hold spaces: fields are counted from behind it.
        fields = stat.rpartition(")")[2].split()
        pid = int(entry.name)
        children.setdefault(int(fields[1]), []).append(pid)
        # utime, stime, cutime, cstime
        used[pid] = sum(map(int, fields[11:15]))
    total = 0
    todo = [root]
    while todo:
        pid = todo.pop()
        total += used.get(pid, 0)
        todo += children.get(pid, [])
    return total / TICKS


class CpuTimes:
    """Measures each test, and writes `file` at the end of the session."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.seconds: dict[str, float] = {}

    def pytest_collection_finish(self) -> None:
        self.seconds[""] = tree_seconds(os.getpid())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = tree_seconds(os.getpid())
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = round(tree_seconds(os.getpid()) - before, 2)

    def pytest_sessionfinish(self) -> None:
        self.file.write_text(json.dumps(self.seconds, indent=0))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-times", metavar="FILE", help="write the CPU seconds of each test into FILE"
    )


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--cpu-times")
    if file:
        config.pluginmanager.register(CpuTimes(Path(file).resolve()), "cpu-times-of-tests")
