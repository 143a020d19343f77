"""The conformance kit for launchers: subclass `LauncherConformance` and name your launcher's function.

Each check is a launch of small scripts (they import no torch) in a process of its own. Needs ds-cli.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

__all__ = ["LauncherConformance"]

SCRIPT = """
import json, os, sys, time
from pathlib import Path
folder, *rest = sys.argv[1:]
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
said = {"arguments": rest, "pid": os.getpid(), **{n: os.environ.get(n) for n in names}}
rank = said["RANK"] or "none"
passing = Path(folder, f"{os.getpid()}.tmp")
passing.write_text(json.dumps(said))
os.replace(passing, Path(folder, f"{rank}.json"))
if rest[0] == "fail":
    if rank == "1":
        while not Path(folder, "0.json").exists():
            time.sleep(0.01)
        sys.exit(3)
    time.sleep(600)
"""
LAUNCH = """
import json, logging, sys
from ds_cli.launch import LaunchRequest
from ds_core.entries import resolve
if __name__ == "__main__":
    load, script, arguments, more = json.loads(sys.argv[1])
    code = resolve(load)(LaunchRequest(script, tuple(arguments), grace=1.0, notice=1.0, **more))
    assert isinstance(code, int), f"the launcher gave {code!r}, not an exit code"
    sys.exit(code)
"""


class LauncherConformance:
    """Inherit, and set `load` to the reference in your `LauncherEntry`. The class's name must start with Test.

    nproc: how many processes to ask for. timeout: seconds for a launch. patience: seconds in which processes must be
    gone after the launcher has returned.
    """

    load: str = ""
    nproc: ClassVar[int] = 2
    timeout: ClassVar[float] = 60.0
    patience: ClassVar[float] = 10.0

    def launch(self, tmp_path: Path, *arguments: str, **more: Any) -> tuple[int, dict[str, dict[str, Any]]]:
        """The exit code, and what each rank wrote, by rank."""
        script = tmp_path / "launched_script.py"
        script.write_text(SCRIPT)
        target = script.stem if more.get("is_module") else str(script)
        folder = tmp_path / "ranks"
        folder.mkdir(exist_ok=True)
        request = json.dumps([self.load, target, [str(folder), *arguments], {"nproc": self.nproc, **more}])
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MASTER_", "RANK", "WORLD_SIZE"))}
        path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
        log = tmp_path / "launcher.log"  # a file: what is left running would keep a pipe open
        with log.open("w") as output:
            done = subprocess.run(
                [sys.executable, "-c", LAUNCH, request],
                env=environment | {"PYTHONPATH": path},
                cwd=tmp_path,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=self.timeout,
                check=False,
            )
        ranks = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
        said = log.read_text(errors="replace")
        assert "AssertionError: the launcher" not in said, said
        assert ranks, f"no process ran the script: {said[-2000:]}"
        return done.returncode, ranks

    def check(self, code: int, ranks: dict[str, dict[str, Any]]) -> None:
        """Assert that all processes ran, each with its own rank, and that nothing failed."""
        assert code == 0, f"the exit code is {code}, though every process ended with 0"
        wanted = [str(r) for r in range(self.nproc)]
        assert sorted(ranks) == wanted, f"processes had RANK {sorted(ranks)}, not {wanted}"
        assert sorted(r["LOCAL_RANK"] for r in ranks.values()) == wanted
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            assert {r[name] for r in ranks.values()} == {str(self.nproc)}, f"{name} is not {self.nproc} everywhere"
        stores = {(r["MASTER_ADDR"], r["MASTER_PORT"]) for r in ranks.values()}
        assert len(stores) == 1 and None not in next(iter(stores)), f"ranks have no common rendezvous: {stores}"

    def test_a_script_runs_on_every_rank(self, tmp_path: Path) -> None:
        """Each process has its rank, all have the same rendezvous, and the script's arguments arrive untouched."""
        words = ("--lr", "0.1 0.2", "", "--flag=a b", "ü")
        code, ranks = self.launch(tmp_path, *words)
        self.check(code, ranks)
        assert [r["arguments"] for r in ranks.values()] == [list(words)] * self.nproc, "arguments were changed"

    def test_a_module_runs_as_one(self, tmp_path: Path) -> None:
        """``is_module``: the script is the name of a module."""
        code, ranks = self.launch(tmp_path, "x", is_module=True)
        self.check(code, ranks)

    def test_one_that_fails_ends_all(self, tmp_path: Path) -> None:
        """The exit code is that of the process that failed, and no other is left running."""
        code, ranks = self.launch(tmp_path, "fail")
        assert code == 3, f"a process ended with 3, the launcher with {code}"
        left, end = [r["pid"] for r in ranks.values()], time.monotonic() + self.patience
        while (left := [pid for pid in left if _runs(pid)]) and time.monotonic() < end:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, 9)
        assert not left, f"{len(left)} processes were still running after the launcher had returned"


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
