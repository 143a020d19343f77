"""One mpiexec for all hosts: Hydra, which MPICH has, and Intel MPI and MVAPICH have from it.

Settings travel in a variable that Hydra forwards. When mpiexec is killed, its proxies on the hosts
end the agents. Hydra waits forever where ssh fails, so `reach` stands between the two and says so.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ds_command_kit.hosts import (
    FromVariable,
    agent_command,
    named_hosts,
    run_tool,
    settings_variable,
)

if TYPE_CHECKING:
    from ds_command_kit.launch import LaunchRequest

RANK = FromVariable("PMI_RANK")
REACH = str(Path(__file__).with_name("reach.py"))
SSH = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
SSH_FAILED = 255
_ENDED = re.compile(rb"reach: ssh to (.+) ended with ([0-9]+)\s*")


def mpich(request: LaunchRequest) -> int:
    """Start the agents by MPICH's mpiexec and wait for them; the run's exit code."""
    return launch(request, "mpich", ("mpiexec.hydra", "mpiexec.mpich", "mpiexec"))


def impi(request: LaunchRequest) -> int:
    """The same by Intel MPI's."""
    root = os.environ.get("I_MPI_ROOT", "")
    own = (os.path.join(root, "bin", "mpiexec.hydra"),) if root else ()
    return launch(request, "impi", (*own, "mpiexec.hydra"))


def mvapich(request: LaunchRequest) -> int:
    """The same by MVAPICH's."""
    return launch(request, "mvapich", ("mpiexec.hydra", "mpiexec"))


def launch(request: LaunchRequest, launcher: str, programs: tuple[str, ...]) -> int:
    """Run the first of `programs` that there is."""
    words = command(request, launcher, next(filter(shutil.which, programs), programs[0]))
    return run_tool(
        request, words, environment=dict([settings_variable(request)]), explain=explain, ends=ends
    )


def command(request: LaunchRequest, launcher: str, program: str) -> list[str]:
    """What starts the agents."""
    hosts = named_hosts(request, launcher)
    name, _ = settings_variable(request)
    port = [] if request.ssh_port is None else ["-p", str(request.ssh_port)]
    ssh = ["-I", "-S", REACH, *(word for option in SSH for word in ("-o", option)), *port]
    return [
        *("env", f"HYDRA_LAUNCHER_EXTRA_ARGS={' '.join(ssh)}", program),
        *("-launcher", "ssh", "-launcher-exec", sys.executable, "-genvlist", name),
        *("-n", str(len(hosts)), "-ppn", "1", "-hosts", ",".join(host.name for host in hosts)),
        *request.launcher_args,
        *agent_command(request, RANK, settings="variable"),
    ]


def ends(line: bytes) -> tuple[str, int] | None:
    """The host whose ssh has ended badly, as `reach` says it."""
    found = _ENDED.fullmatch(line)
    return (found[1].decode(errors="replace"), int(found[2])) if found else None


def explain(host: str, code: int) -> str:
    """What to say of an end of which no agent tells."""
    if host and code == SSH_FAILED:
        return f"lost host {host}, or ssh could not reach it (what ssh says is above)"
    if host:
        return f"host {host} could not run Hydra's proxy: exit code {code} (what it says is above)"
    return f"mpiexec {f'ended with exit code {code}' if code > 0 else f'was killed by signal {-code}'} (above)"
