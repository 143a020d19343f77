"""Namespaces on Linux, and the process that holds them: the hosts of `ds_testing_hosts.lab`."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPACES = ("--net", "--uts", "--mount", "--pid", "--ipc")

# Arguments: host name, the user's home, then folders to keep although they lie under /tmp. Stdin:
# /etc/hosts, up to an empty line. /sys is mounted anew so that it shows the devices of this
# network; the cgroups below it stay.
_HOLDER = r"""
set -e
name=$1 home=$2; shift 2
mount -t tmpfs lab /run
mkdir -p /run/lab /run/sshd /run/lab/cgroup
hostname "$name"
number=0
for folder; do
  number=$((number + 1)); mkdir "/run/lab/$number"; mount --rbind "$folder" "/run/lab/$number"
done
mount -t tmpfs -o mode=1777 lab /tmp
mount -t tmpfs -o mode=1777 lab /dev/shm
mkdir -p -m 700 "$home/.ssh"
mount -t tmpfs -o mode=700 lab "$home/.ssh"
number=0
for folder; do
  number=$((number + 1)); mkdir -p "$folder"; mount --rbind "/run/lab/$number" "$folder"
done
: > /run/lab/hosts
while read -r line && [ -n "$line" ]; do echo "$line" >> /run/lab/hosts; done
echo "$name" > /run/lab/hostname
: > /run/lab/resolv.conf
for file in hosts hostname resolv.conf; do
  [ ! -e "/etc/$file" ] || mount --bind "/run/lab/$file" "/etc/$file"
done
if [ -d /sys/fs/cgroup ]; then
  mount --rbind /sys/fs/cgroup /run/lab/cgroup
  mount -t sysfs lab /sys
  mount --rbind /run/lab/cgroup /sys/fs/cgroup
fi
ip link set lo up
echo ready
exec env --ignore-signal=CHLD cat > /dev/null
"""


class LabError(RuntimeError):
    """A host or a link could not be made."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a host."""

    pid: int
    """As this process sees it."""
    state: str
    """A letter, as in ps."""
    words: tuple[str, ...]
    """Its command line."""
    environ: Mapping[str, str]


class Holder:
    """Namespaces, and the process that holds them.

    pid: of the first process inside, as this process sees it.
    """

    def __init__(self, name: str, table: str, keep: Sequence[str]) -> None:
        home = pwd.getpwuid(os.geteuid()).pw_dir
        self.process = subprocess.Popen(
            [
                "unshare",
                *SPACES,
                "--fork",
                "--kill-child",
                "--mount-proc",
                "sh",
                "-c",
                _HOLDER,
                "sh",
                name,
                home,
                *keep,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdin and self.process.stdout and self.process.stderr
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(table + "\n")
            self.process.stdin.flush()
        if self.process.stdout.readline() != "ready\n":
            self.process.kill()
            raise LabError(f"host {name!r}: {self.process.communicate()[1].strip()}")
        self.pid = children(self.process.pid)[0]

    def end(self) -> None:
        """End every process inside at once; returns when all are gone."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self.process.wait()
        put_away(self.process)

    def words(self, command: Sequence[str], cwd: str = "/") -> list[str]:
        """A command line that runs `command` inside."""
        return [
            "nsenter",
            "-t",
            str(self.pid),
            "-m",
            "-u",
            "-i",
            "-n",
            "-p",
            "--",
            "env",
            "-C",
            cwd,
            *command,
        ]

    def network(self, *commands: str, program: str = "ip") -> None:
        """Run commands of ip, or tc, in its network; a pid in them is one as this process sees
        it."""
        words = ["nsenter", "-t", str(self.pid), "-n", "--", program, "-batch", "-"]
        done = subprocess.run(
            words, input="\n".join(commands) + "\n", capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise LabError(
                f"{program} {'; '.join(commands)}: {(done.stderr or done.stdout).strip()}"
            )

    def processes(self) -> list[Process]:
        """All processes inside but the first."""
        mine = os.stat(f"/proc/{self.pid}/ns/pid").st_ino
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it ended
                if int(name) != self.pid and os.stat(f"/proc/{name}/ns/pid").st_ino == mine:
                    found.append(_process(int(name)))
        return found


def put_away(process: subprocess.Popen[Any]) -> None:
    """Wait for a process whose host is off, and close its pipes."""
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def children(pid: int) -> list[int]:
    """The processes that a process has started; none when it has ended."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _process(pid: int) -> Process:
    folder = Path(f"/proc/{pid}")
    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
    words = tuple((folder / "cmdline").read_bytes().decode(errors="replace").split("\0")[:-1])
    pairs = (
        item.partition("=")
        for item in (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    )
    return Process(pid, state, words, {name: value for name, _, value in pairs if name})
