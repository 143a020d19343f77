"""One pdsh for all hosts.

It carries no input, so settings are an argument, which `ps` shows on the hosts.

What it does give: standard input of an agent ends when pdsh does, however that ends.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import TYPE_CHECKING

from ds_command_kit.hosts import agent_command, named_hosts, run_tool

if TYPE_CHECKING:
    from ds_command_kit.launch import LaunchRequest

# ssh takes the first value that it gets for an option, so the user's own (PDSH_SSH_ARGS_APPEND)
# come before these.
OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
NUMBER = "%n"  # pdsh puts a host's place in the list there
SSH_FAILED = 255
_ENDED = re.compile(rb"pdsh@[^:]*: ([^:]+): ssh exited with exit code ([0-9]+)\s*")


def launch(request: LaunchRequest) -> int:
    """Start the agents of all hosts and wait for them; the run's exit code."""
    return run_tool(request, command(request), explain=explain, ends=ends)


def command(request: LaunchRequest) -> list[str]:
    """What starts the agents. `env` is there so that ``--show`` shows all that counts."""
    hosts = named_hosts(request, "pdsh", users=True)
    agent = agent_command(request, NUMBER, settings="argument", lifeline="end")
    remote = shlex.join([word if word == NUMBER else word.replace("%", "%%") for word in agent])
    options = [word for option in OPTIONS for word in ("-o", option)]
    port = [] if request.ssh_port is None else ["-p", str(request.ssh_port)]
    ssh = " ".join(filter(None, [os.environ.get("PDSH_SSH_ARGS_APPEND", ""), *options, *port]))
    names = ",".join(host.name for host in hosts)
    pdsh = [
        "pdsh",
        "-R",
        "ssh",
        "-S",
        "-N",
        "-b",
        "-f",
        str(len(hosts)),
        "-w",
        names,
        *request.launcher_args,
    ]
    return ["env", f"PDSH_SSH_ARGS_APPEND={ssh}", *pdsh, remote]


def ends(line: bytes) -> tuple[str, int] | None:
    """The host whose ssh has ended badly; pdsh itself waits for all the others."""
    found = _ENDED.fullmatch(line)
    return (found[1].decode(errors="replace"), int(found[2])) if found else None


def explain(host: str, code: int) -> str:
    """What to say of an end that the agent itself does not tell of."""
    if not host:
        return (
            f"pdsh ended with exit code {code} (what it says is above)"
            if code > 0
            else f"pdsh was killed ({-code})"
        )
    if code == SSH_FAILED:
        return f"lost host {host}, or ssh could not reach it (what ssh says is above)"
    if code in (126, 127):
        return (
            f"host {host} cannot run this Python (above); the same path must lead to it on "
            "every "
            "host"
        )
    return ""
