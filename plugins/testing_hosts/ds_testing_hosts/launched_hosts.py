"""The conformance kit for launchers that start on several hosts: subclass `HostsConformance`; needs
a lab and dscore-cli.

Real hosts, real programs: each check runs ``dscore run`` on the head of a `Lab`. Mark the subclass
`hosts`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ds_testing.processes import clean_environment, disposed

from ds_testing_hosts.lab import Host, Lab, Process, unavailable

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
folder, what, *rest = sys.argv[1:]
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LAB_SECRET", "PYTHONLAB")
said = {"arguments": rest, "host": os.uname().nodename, "folder": os.getcwd(), **{n: os.environ.get(n) for n in names}}
def say(kind):
    passing = Path(folder, f"{kind}{said['RANK']}.tmp")
    passing.write_text(json.dumps(said))
    os.replace(passing, Path(folder, f"{kind}{said['RANK']}"))
def save(*_):
    time.sleep(1)
    say("saved")
    sys.exit(75)
if what == "save":
    signal.signal(signal.SIGTERM, save)
print("rank", said["RANK"], "speaks", flush=True)
say("began")
if what != "end":
    end = time.monotonic() + 300
    while time.monotonic() < end and not (what == "fail" and len(list(Path(folder).glob("began[0-9]"))) == 4):
        time.sleep(0.02)
    if said["RANK"] == "2":
        raise ValueError("the third rank fails")
    time.sleep(300)
"""
SECRET = "swordfish-4711"


class Launched:
    """A launcher that can be used: the lab, the folder that all hosts see, and how ``dscore run``
    is called.
    """

    def __init__(
        self, lab: Lab, folder: Path, words: list[str], environment: dict[str, str]
    ) -> None:
        self.lab = lab
        self.folder = folder
        self.words = words
        self.environment = environment

    def start(self, name: str, what: str, *arguments: str) -> tuple[subprocess.Popen[Any], Path]:
        """A run of the script in a folder of its own."""
        folder = self.folder / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "script.py").write_text(SCRIPT)
        (folder / ".deepspeed_env").write_text(f"LAB_SECRET={SECRET}\n")
        words = [*self.words, str(folder / "script.py"), str(folder), what, *arguments]
        with disposed(ignored=False):
            return self.lab.head.popen(words, cwd=folder, env=self.environment), folder

    def left(self, folder: Path) -> list[tuple[Host, Process]]:
        """What still runs on the hosts of a run: agents and ranks."""
        return [
            (host, process)
            for host in self.lab.everyone
            if host.on
            for process in host.processes()
            if process.state not in "ZX" and self.is_ours(process, folder)
        ]

    @staticmethod
    def is_ours(process: Process, folder: Path) -> bool:
        """Whether it is an agent or a rank, or watches some."""
        words = " ".join(process.words)
        return (
            "ds_cli.multi_host.agent" in words
            or str(folder) in words
            or "ds_cli/local/orphan_cleanup.py" in words
        )

    def gone(self, folder: Path, seconds: float) -> None:
        """Wait until nothing runs any more."""
        end = time.monotonic() + seconds
        while left := self.left(folder):
            assert time.monotonic() < end, (
                f"after {seconds} s there are still {[(h.name, p) for h, p in left]}"
            )
            time.sleep(0.1)

    def all_began(self, process: subprocess.Popen[Any], folder: Path) -> None:
        """Wait for the four ranks."""
        end = time.monotonic() + 60
        while len(list(folder.glob("began[0-9]"))) < 4:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end, "the ranks did not begin"
            time.sleep(0.05)


class HostsConformance:
    """Inherit, name the launcher, and mark the class with ``pytest.mark.hosts``.

    The class's name must start with Test.
    """

    launcher: ClassVar[str] = ""
    """Its name."""
    more: ClassVar[tuple[str, ...]] = ()
    """Further words of ``dscore run``."""
    programs: ClassVar[tuple[str, ...]] = ()
    """Programs that it needs."""
    tool: ClassVar[str] = ""
    """The program that reaches the hosts."""
    secret: ClassVar[bool] = True
    """Whether what goes to the hosts cannot be read in `ps`."""
    lab_ssh: ClassVar[bool] = False
    """Whether the hosts have ssh."""
    preempted: ClassVar[int] = 75
    """The exit code after SIGTERM where ranks end with 75."""

    @classmethod
    def prepare(cls, lab: Lab, folder: Path) -> tuple[list[str], dict[str, str]]:
        """Words before ``dscore run``, and its environment; starts what the launcher needs."""
        return [], clean_environment()

    @pytest.fixture(scope="class")
    @classmethod
    def launched(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
        """Three hosts, of which a and b are used, b first."""
        if reason := unavailable():
            pytest.skip(reason)
        if missing := [name for name in cls.programs if shutil.which(name) is None]:
            pytest.skip(f"there is no {', '.join(missing)}")
        folder = tmp_path_factory.mktemp(cls.launcher)
        with Lab("a", "b", "c", ssh=cls.lab_ssh, shared=[folder]) as lab:
            before, environment = cls.prepare(lab, folder)
            (folder / "hosts.txt").write_text("b slots=2\na slots=2\n")
            run = [sys.executable, "-m", "ds_cli", "run", "--hostfile", str(folder / "hosts.txt")]
            words = [*before, *run, "--launcher", cls.launcher, "--grace", "2", *cls.more]
            yield Launched(lab, folder, words, {**environment, "PYTHONLAB": "of the launcher"})

    def first_host(self) -> str:
        """Which host has number 0."""
        return "b"

    def test_ranks(self, launched: Launched) -> None:
        """Ranks by host, in order; words, folder and variables arrive, and all output comes
        back."""
        words = ("--lr", "0.1 0.2", "", "a'b$HOME%n", "ü")
        process, folder = launched.start("ranks", "end", *words)
        said = process.communicate(timeout=60)[0]
        assert process.returncode == 0, said
        ranks = [json.loads((folder / f"began{rank}").read_text()) for rank in range(4)]
        order = [self.first_host(), "a" if self.first_host() == "b" else "b"]
        assert [rank["host"] for rank in ranks] == [name for name in order for _ in range(2)], said
        assert [rank["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0", "1"]
        assert {rank["WORLD_SIZE"] for rank in ranks} == {"4"}
        assert {rank["MASTER_ADDR"] for rank in ranks} == {order[0]}
        assert [rank["arguments"] for rank in ranks] == [list(words)] * 4
        assert {rank["folder"] for rank in ranks} == {str(folder)}
        assert {(rank["LAB_SECRET"], rank["PYTHONLAB"]) for rank in ranks} == {
            (SECRET, "of the launcher")
        }
        assert sorted(line for line in said.splitlines() if line.endswith("speaks")) == [
            f"rank {rank} speaks" for rank in range(4)
        ]

    def test_first_failure(self, launched: Launched) -> None:
        """The traceback once, with rank and host; its exit code; nothing is left."""
        process, folder = launched.start("fails", "fail")
        said = process.communicate(timeout=60)[0]
        began = time.monotonic()
        assert process.returncode == 1, said
        # in the traceback and in the line about it
        assert said.count("ValueError: the third rank fails") == 2, said
        host = "a" if self.first_host() == "b" else "b"
        assert f" on {host})" in next(
            line for line in said.splitlines() if line.startswith("dscore: rank 2 of 4")
        )
        launched.gone(folder, 10)
        assert time.monotonic() < began + 10

    @pytest.mark.parametrize("who", ["dscore", "tool"])
    def test_launcher_is_killed(self, launched: Launched, who: str) -> None:
        """Everything ends within 30 s, and secrets were nowhere to be read."""
        process, folder = launched.start(f"killed_{who}", "wait")
        launched.all_began(process, folder)
        seen = [" ".join(p.words) for host in launched.lab.everyone for p in host.processes()]
        assert not any(SECRET in words for words in seen)
        if self.secret:
            agents = [words for words in seen if "ds_cli.multi_host.agent" in words]
            assert agents
            assert not any(len(words) > 4000 or "--settings " in words for words in agents), agents
        if who == "dscore":
            victims = [
                p for p in launched.lab.head.processes() if "ds_cli" in p.words and "run" in p.words
            ]
        else:
            victims = [p for p in launched.lab.head.processes() if p.words and self.is_tool(p)]
        assert victims
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
        launched.gone(folder, 30)
        process.communicate(timeout=30)
        assert process.returncode != 0

    def is_tool(self, process: Process) -> bool:
        """Whether a process of the head is the program that reaches the hosts."""
        return os.path.basename(process.words[0]) == self.tool

    def stop(self, launched: Launched, name: str, what: str, number: int) -> tuple[int, str, Path]:
        """Exit code, output and folder of a run whose launcher gets a signal."""
        process, folder = launched.start(name, what)
        launched.all_began(process, folder)
        for victim in launched.lab.head.processes():
            if (
                "ds_cli" in victim.words
                and "run" in victim.words
                and victim.words[0] == sys.executable
            ):
                os.kill(victim.pid, number)
        said = process.communicate(timeout=30)[0]
        launched.gone(folder, 15)
        return process.returncode, said, folder

    def test_stopped(self, launched: Launched) -> None:
        """Ctrl-C ends all, and the exit code says so."""
        code, said, _ = self.stop(launched, "stopped", "wait", signal.SIGINT)
        assert "dscore: stopped by SIGINT" in said, said
        assert code == 128 + signal.SIGINT

    def test_stopped_with_notice(self, launched: Launched) -> None:
        """After SIGTERM ranks may save, and an exit code says that they have."""
        code, said, folder = self.stop(launched, "saved", "save", signal.SIGTERM)
        assert len(list(folder.glob("saved[0-9]"))) == 4, said
        assert code == self.preempted, said

    def test_link_is_cut(self, launched: Launched) -> None:
        """The run ends within 30 s and names a host; what runs behind the cut ends too."""
        process, folder = launched.start("cut", "wait")
        launched.all_began(process, folder)
        second = launched.lab.host("a" if self.first_host() == "b" else "b")
        began = time.monotonic()
        second.cut()
        try:
            said = process.communicate(timeout=60)[0]
            seconds = time.monotonic() - began
            launched.gone(folder, 30)
        finally:
            second.mend()
        assert process.returncode not in (0, None), said
        assert seconds < 30, f"after {seconds:.0f} s:\n{said}"
        assert f"lost host {second.name}" in said, said


class SshHostsConformance(HostsConformance):
    """For launchers that reach hosts by ssh."""

    lab_ssh = True

    def test_host_that_cannot_be_reached(self, launched: Launched) -> None:
        """The run ends within 30 s and names the host."""
        launched.lab.host("a").stop_ssh()
        try:
            began = time.monotonic()
            process, folder = launched.start("refused", "end")
            said = process.communicate(timeout=60)[0]
            assert process.returncode not in (0, None), said
            assert time.monotonic() < began + 30, said
            assert any(
                "a" in line.replace(":", " ").replace(",", " ").split()
                for line in said.splitlines()
            ), said
            launched.gone(folder, 15)
        finally:
            launched.lab.host("a").start_ssh()
