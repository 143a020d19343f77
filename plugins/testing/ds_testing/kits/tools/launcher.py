"""The conformance kit for launchers: subclass `LauncherConformance` and name your launcher's
function.

Each check is a launch of small scripts (they import no torch) in a process of its own. Needs
dscore-cli.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from ds_testing.processes import clean_environment

SECRET = "kit a'b$ü"  # what no process list may show
SCRIPT = """
import fcntl, glob, json, os, sys, time
from pathlib import Path
folder, *rest = sys.argv[1:]
names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
said = {"arguments": rest, "pid": os.getpid(), **{n: os.environ.get(n) for n in (*names, "KIT_SECRET")}}
said["seen"] = False
for file in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        words = Path(file).read_bytes().split(b"\\0")
    except OSError:
        continue
    said["seen"] |= b"--settings" in words or os.environ.get("KIT_SECRET", "").encode() in words[1:]
rank = said["RANK"] or "none"
held = open(Path(folder, f"{os.getpid()}-{rank}.lock"), "w")
fcntl.flock(held, fcntl.LOCK_EX)
passing = Path(folder, f"{os.getpid()}-{rank}.tmp")
passing.write_text(json.dumps(said))
os.replace(passing, Path(folder, f"{rank}.json"))
if rest[0] == "fail":
    if rank == "1":
        while not Path(folder, "0.json").exists():
            time.sleep(0.01)
        sys.exit(3)
    time.sleep(600)
if rest[0] == "wait":
    time.sleep(600)
"""
LAUNCH = """
import json, sys
from ds_command_kit.hosts.hostfile import Host
from ds_command_kit.launch import LaunchRequest
from ds_core.entries import resolve
if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as stream:
        load, script, arguments, hosts, exported, more = json.load(stream)
    hosts = tuple(Host(name, tuple(range(slots))) for name, slots in hosts)
    exported = tuple(map(tuple, exported))
    request = LaunchRequest(script, tuple(arguments), grace=1.0, notice=1.0, hosts=hosts, exported=exported, **more)
    code = resolve(load)(request)
    assert isinstance(code, int), f"the launcher gave {code!r}, not an exit code"
    sys.exit(code)
"""


class LauncherConformance:
    """Inherit, and set `load` to the reference in your `LauncherEntry`.

    The class's name must start with Test.

    For real hosts override `popen`, which starts the launcher, and set `master_addr` to "".
    """

    load: str = ""
    nproc: ClassVar[int] = 2
    """How many processes to ask for, on each host."""
    hosts: ClassVar[tuple[str, ...]] = ()
    """Set their names for a launcher that reaches hosts. Its agents then run on this host."""
    programs: ClassVar[Mapping[str, str]] = {}
    """Stand-ins for the program that reaches hosts: name -> lines of sh, such as ``{"docker":
    'shift 3; exec "$@"'}``.
    """
    launcher_args: ClassVar[tuple[str, ...]] = ()
    master_addr: ClassVar[str] = "127.0.0.1"
    hides: ClassVar[bool] = True
    """Whether the run's variables stay out of what `ps` shows; where they cannot, the launcher's
    README says so.
    """
    nodes: ClassVar[tuple[int, int]] = (0, 0)
    """Fewest and most hosts, of a launcher that finds them itself. `dscore run` gives 0 and 0
    unless it is given a number; then the launcher decides.
    """
    timeout: ClassVar[float] = 60.0
    """Seconds for a launch."""
    patience: ClassVar[float] = 10.0
    """Seconds in which processes must be gone after the launcher has returned, or was killed."""

    def popen(self, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start the launcher where it is to run; options: cwd, env, stdin, stdout, stderr as of
        subprocess.
        """
        return subprocess.Popen(command, **options)

    def launch(
        self, tmp_path: Path, *arguments: str, **more: Any
    ) -> tuple[int, dict[str, dict[str, Any]]]:
        """The exit code, and what each rank wrote, by rank."""
        with self.launched(tmp_path, *arguments, **more) as launcher:
            code = launcher.wait(self.timeout)
        ranks = _ranks(tmp_path)
        text = said(tmp_path)
        assert "AssertionError: the launcher" not in text, text
        assert ranks, f"no process ran the script: {text[-2000:]}"
        return code, ranks

    @contextlib.contextmanager
    def launched(
        self, tmp_path: Path, *arguments: str, **more: Any
    ) -> Iterator[subprocess.Popen[Any]]:
        """The launcher, which is killed at the end if it still runs."""
        script = tmp_path / "launched_script.py"
        script.write_text(SCRIPT)
        (tmp_path / "ranks").mkdir(exist_ok=True)
        target = script.stem if more.get("is_module") else str(script)
        request = tmp_path / "request.json"
        request.write_text(
            json.dumps(
                [
                    self.load,
                    target,
                    [str(tmp_path / "ranks"), *arguments],
                    *self._where(tmp_path, more),
                ]
            )
        )
        search = f"{self._programs(tmp_path)}{os.pathsep}{os.environ['PATH']}"
        environment = clean_environment(PYTHONPATH=_path(tmp_path), PATH=search)
        # a file: what is left running would keep a pipe open
        with (tmp_path / "launcher.log").open("w") as output:
            launcher = self.popen(
                [sys.executable, "-c", LAUNCH, str(request)],
                env=environment,
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield launcher
        finally:
            if launcher.poll() is None:
                launcher.kill()
                launcher.wait()

    def _where(
        self, tmp_path: Path, more: dict[str, Any]
    ) -> tuple[list[Any], list[Any], dict[str, Any]]:
        """Hosts, variables for them, and the other fields of the request."""
        if not self.hosts:
            low, most = self.nodes
            return [], [], {"nproc": self.nproc, "min_nodes": low, "max_nodes": most, **more}
        count = len(self.hosts)
        fixed = {"min_nodes": count, "max_nodes": count, "launcher_args": self.launcher_args}
        place = (
            {"master_addr": self.master_addr, "master_port": _free_port()}
            if self.master_addr
            else {}
        )
        # Variables may be passwords, so the tests look for this one on command lines and in the
        # log.
        secret = [["KIT_SECRET", SECRET], ["PYTHONPATH", _path(tmp_path)]]
        return [[name, self.nproc] for name in self.hosts], secret, {**fixed, **place, **more}

    def _programs(self, tmp_path: Path) -> Path:
        folder = tmp_path / "programs"
        folder.mkdir(exist_ok=True)
        for name, lines in self.programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{lines}\n")
            (folder / name).chmod(0o755)
        return folder

    def check(self, code: int, ranks: dict[str, dict[str, Any]]) -> None:
        """Assert that all processes ran, each with its own rank, and that nothing failed."""
        assert code == 0, f"the exit code is {code}, though every process ended with 0"
        size = self.nproc * max(1, len(self.hosts))
        wanted = [str(rank) for rank in range(size)]
        assert sorted(ranks) == sorted(wanted), f"processes had RANK {sorted(ranks)}, not {wanted}"
        for rank, row in ranks.items():
            host, local = divmod(int(rank), self.nproc)
            assert row["LOCAL_RANK"] == str(local), (
                f"rank {rank} has LOCAL_RANK {row['LOCAL_RANK']}, not {local}"
            )
            where = row["GROUP_RANK"]
            assert not self.hosts or where == str(host), (
                f"rank {rank} is on host {where}, not {host}"
            )
        for name, number in (("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", self.nproc)):
            assert {r[name] for r in ranks.values()} == {str(number)}, (
                f"{name} is not {number} everywhere"
            )
        stores = {(r["MASTER_ADDR"], r["MASTER_PORT"]) for r in ranks.values()}
        assert len(stores) == 1 and None not in next(iter(stores)), (
            f"ranks have no common rendezvous: {stores}"
        )

    def test_a_script_runs_on_every_rank(self, tmp_path: Path) -> None:
        """Each process has its rank, all have one rendezvous, arguments arrive untouched, variables
        arrive unseen.
        """
        words = ("--lr", "0.1 0.2", "", "--flag=a b", "ü")
        code, ranks = self.launch(tmp_path, *words)
        self.check(code, ranks)
        assert [r["arguments"] for r in ranks.values()] == [list(words)] * len(ranks), (
            "arguments were changed"
        )
        if self.hosts:
            assert {r["KIT_SECRET"] for r in ranks.values()} == {SECRET}, (
                "variables of the request did not arrive"
            )
            seen = any(r["seen"] for r in ranks.values())
            assert not (self.hides and seen), "the run's variables stand on a command line"
            assert SECRET not in said(tmp_path), "the launcher shows what a variable holds"

    def test_a_module_runs_as_one(self, tmp_path: Path) -> None:
        """``is_module``: the script is the name of a module."""
        code, ranks = self.launch(tmp_path, "x", is_module=True)
        self.check(code, ranks)

    def test_one_that_fails_ends_all(self, tmp_path: Path) -> None:
        """The exit code is that of the process that failed, and no other is left running."""
        code, _ = self.launch(tmp_path, "fail")
        assert code == 3, f"a process ended with 3, the launcher with {code}"
        self._gone(tmp_path, self.patience, "after the launcher had returned")
        if self.hosts:
            lines = [
                line for line in said(tmp_path).splitlines() if line.startswith("dscore: rank 1 ")
            ]
            assert len(lines) == 1, (
                f"the failure of rank 1 is reported {len(lines)} times: {said(tmp_path)[-2000:]}"
            )

    def test_nothing_is_left_when_it_is_killed(self, tmp_path: Path) -> None:
        """SIGKILL leaves a launcher no time to end its processes; they end nevertheless."""
        with self.launched(tmp_path, "wait") as launcher:
            size = self.nproc * max(1, len(self.hosts))
            everyone = _until(
                lambda: len(_ranks(tmp_path)) == size or launcher.poll() is not None, self.timeout
            )
            assert everyone and launcher.poll() is None, (
                f"the processes did not start: {said(tmp_path)[-2000:]}"
            )
            # Only once all processes run: one that starts later would be missed by the count.
            launcher.send_signal(signal.SIGKILL)
            launcher.wait()
        self._gone(tmp_path, self.patience + 20 * bool(self.hosts), "after the launcher was killed")

    def test_what_is_shown_is_not_run(self, tmp_path: Path) -> None:
        """``show``, of a launcher for hosts: what would be run is printed, and nothing is."""
        if not self.hosts:
            return  # `dscore run --show` does it
        with self.launched(tmp_path, "x", show=True) as launcher:
            code = launcher.wait(self.timeout)
        assert code == 0 and not _ranks(tmp_path), (
            f"exit code {code}; ran: {sorted(_ranks(tmp_path))}"
        )
        assert "launched_script.py" in said(tmp_path), f"the script is not shown: {said(tmp_path)}"
        assert SECRET not in said(tmp_path), "the launcher shows what a variable holds"

    def _gone(self, tmp_path: Path, seconds: float, when: str) -> None:
        """Assert that all processes end within `seconds`; those that did not are killed."""
        _until(lambda: not _running(tmp_path), seconds)
        left = _running(tmp_path)
        # With another `popen` the ids may be those of another host or namespace.
        for pid in left if type(self).popen is LauncherConformance.popen else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left, f"{len(left)} processes were still running {when}"


def said(tmp_path: Path) -> str:
    """What the launcher, and what it started, has written."""
    return (tmp_path / "launcher.log").read_text(errors="replace")


def _ranks(tmp_path: Path) -> dict[str, dict[str, Any]]:
    return {file.stem: json.loads(file.read_text()) for file in (tmp_path / "ranks").glob("*.json")}


def _running(tmp_path: Path) -> list[int]:
    """The ids of processes that hold their locks, on whichever host they run."""
    left = []
    for file in (tmp_path / "ranks").glob("*.lock"):
        with file.open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                left.append(int(file.stem.partition("-")[0]))
    return left


def _until(true: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _path(tmp_path: Path) -> str:
    return os.pathsep.join([str(tmp_path), *filter(None, sys.path)])


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
