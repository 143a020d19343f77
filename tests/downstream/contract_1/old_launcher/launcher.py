"""Starts one agent on each host by a program that reaches it: here ``docker exec``, for hosts that are containers.

The agent starts the processes of its host, watches them and those of the other hosts, and says what fails.
"""

from __future__ import annotations

from ds_cli.hosts import agent_command, run_tools, settings_line
from ds_cli.launch import LaunchRequest
from ds_cli.show import CommandError


def start(request: LaunchRequest) -> int:
    """The exit code of the process that failed first, or 0; no process is left running."""
    if not request.hosts or request.min_nodes != request.max_nodes:
        raise CommandError("old_launcher needs --hostfile FILE, and starts a fixed number of hosts")
    commands = {host.name: command(request, number) for number, host in enumerate(request.hosts)}
    # The settings go to each agent's input, which then stays open as a sign that the launcher is there.
    return run_tools(request, commands, feed=settings_line(request), lifeline=True, explain=explain)


def command(request: LaunchRequest, number: int) -> list[str]:
    """What starts the agent of one host."""
    reach = ["docker", "exec", "-i", *request.launcher_args, request.hosts[number].name]
    return [*reach, *agent_command(request, number, settings="stdin", lifeline=True)]


def explain(host: str, code: int) -> str:
    """What to say of an exit code that is the program's own and not the agent's."""
    return f"docker could not start the agent in {host} (above)" if code in (125, 126, 127) else ""
