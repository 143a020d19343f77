"""One mpirun for all hosts, with one program for each: whatever the order of ``--host``, it serves
its own host first.

Settings travel in a variable that mpirun forwards. When mpirun is killed, its daemons end the
agents.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from ds_command_kit.hosts import agent_command, named_hosts, run_tool, settings_variable

if TYPE_CHECKING:
    from ds_command_kit.launch import LaunchRequest

# where several MPI are installed, Debian's name tells which one it is
NAMES = ("mpirun.openmpi", "mpirun")
SSH = "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3"


def launch(request: LaunchRequest) -> int:
    """Start the agents of all hosts and wait for them; the run's exit code."""
    return run_tool(
        request, command(request), environment=dict([settings_variable(request)]), explain=explain
    )


def command(request: LaunchRequest) -> list[str]:
    """What starts the agents.

    Open MPI's parameters are variables, as far as they can be, since 5 has other options.
    """
    hosts = named_hosts(request, "openmpi")
    name, _ = settings_variable(request)
    program = next(filter(shutil.which, NAMES), NAMES[-1])
    port = "" if request.ssh_port is None else f" -p {request.ssh_port}"
    parameters = {
        "plm_rsh_args": SSH + port,
        # between SIGTERM and SIGKILL; mpirun sleeps so long after every bad end
        "odls_base_sigkill_timeout": 3,
        # a host whose link is cut is noticed after 5 + 3 x 3 seconds, not 300
        "oob_tcp_keepalive_time": 5,
        "oob_tcp_keepalive_intvl": 3,
        "oob_tcp_keepalive_probes": 3,
    }
    words = [
        "env",
        *(f"OMPI_MCA_{key}={value}" for key, value in parameters.items()),
        program,
        "-q",
    ]
    words += ["--bind-to", "none", *request.launcher_args]
    for number, host in enumerate(hosts):
        agent = agent_command(request, number, settings="variable")
        words += [":"] * (number > 0) + ["-np", "1", "--host", host.name, "-x", name, *agent]
    return words


def explain(where: str, code: int) -> str:
    """What to say of an end of which no agent tells."""
    ended = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
    return f"mpirun {ended}: it could not start a host, or lost one (what ssh says is above)"
