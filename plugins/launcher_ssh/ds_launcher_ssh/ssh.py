"""One ssh per host, whose standard input carries the settings and then the sign that the launcher
is there.

Nothing goes through a shell but one quoted argument list, which sshd hands to the user's login
shell.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from ds_command_kit.hosts import agent_command, run_tools, settings_line
from ds_command_kit.show import CommandError

from ds_launcher_ssh.elastic_store import store_here

if TYPE_CHECKING:
    from ds_command_kit.launch import LaunchRequest

# ssh takes the first value that it gets for an option, so the user's own (--launcher-args) come
# before these. It must not ask for a password or about a host's key: several would ask at once, and
# nobody may be there.
OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": 10,
    "ServerAliveInterval": 5,
    "ServerAliveCountMax": 3,
}
SSH_FAILED = 255


def launch(request: LaunchRequest) -> int:
    """Start the agents of all hosts and wait for them; the run's exit code."""
    if not request.hosts:
        raise CommandError(
            "the launcher ssh needs --hostfile FILE, with a line `name slots=K` for each host"
        )
    if request.min_nodes != request.max_nodes:
        with store_here(request) as placed:
            return _run(placed)
    return _run(request)


def _run(request: LaunchRequest) -> int:
    commands = {host.name: command(request, number) for number, host in enumerate(request.hosts)}
    names = {
        host.name: f"host {host.name}{_ranks(request, number)}"
        for number, host in enumerate(request.hosts)
    }

    def say(where: str, code: int) -> str:
        return explain(names[where], code)

    elastic = request.min_nodes != request.max_nodes
    return run_tools(
        request, commands, feed=settings_line(request), lifeline=True, explain=say, again=elastic
    )


def command(request: LaunchRequest, number: int) -> list[str]:
    """What reaches host `number` and starts its agent."""
    options = [word for name, value in OPTIONS.items() for word in ("-o", f"{name}={value}")]
    port = [] if request.ssh_port is None else ["-p", str(request.ssh_port)]
    remote = shlex.join(agent_command(request, number, settings="stdin", lifeline=True))
    return [
        "ssh",
        "-T",
        *request.launcher_args,
        *options,
        *port,
        "--",
        request.hosts[number].name,
        remote,
    ]


def _ranks(request: LaunchRequest, number: int) -> str:
    """Which ranks run on host `number`, as far as that is known before they start."""
    counts = [
        len(host.slots) if host.slots is not None else request.nproc for host in request.hosts
    ]
    if None in counts or request.min_nodes != request.max_nodes:
        return ""
    known = [count or 0 for count in counts]
    first = sum(known[:number])
    last = first + known[number] - 1
    total = sum(known)
    return (
        f" (rank {first} of {total})" if first == last else f" (ranks {first} to {last} of {total})"
    )


def explain(host: str, code: int) -> str:
    """What to say of an end that the agent itself does not tell of."""
    if code == SSH_FAILED:
        return f"lost {host}, or ssh could not reach it (what ssh says is above)"
    if code in (126, 127):
        return f"{host} cannot run this Python (above); the same path must lead to it on every host"
    if code < 0:
        return f"lost {host}: its ssh was killed by signal {-code}"
    return ""
