"""One srun for all nodes of an allocation; no ssh. Its standard input reaches every agent.

It carries the settings and then the sign that the launcher is there. SIGTERM at srun would kill
agents and ranks at once; the end of its input lets them end by themselves.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
from typing import TYPE_CHECKING

from ds_command_kit.hosts import FromVariable, Host, agent_command, run_tool, settings_line
from ds_command_kit.show import CommandError

if TYPE_CHECKING:
    from ds_command_kit.launch import LaunchRequest

# the node's place in the step's list, which has the allocation's order
NODE = FromVariable("SLURM_NODEID")
_ENDED = re.compile(rb"srun: error: ([^:]+): tasks? [^:]+: Exited with exit code ([0-9]+)\s*")


def launch(request: LaunchRequest) -> int:
    """Start the agents of all nodes and wait for them; the run's exit code."""
    request = in_allocation(request, nodes())
    settings = settings_line(request)
    return run_tool(
        request, command(request), feed=settings, lifeline=True, explain=explain, ends=ends
    )


def nodes() -> list[str]:
    """The nodes of the allocation that we run in. Raises CommandError where there is none."""
    listed = os.environ.get("SLURM_JOB_NODELIST") or os.environ.get("SLURM_NODELIST")
    if not listed:
        raise CommandError(
            "the launcher slurm needs an allocation: `salloc -N 2 dscore run --launcher slurm "
            "...`, or the same "
            "`dscore run` in a script for sbatch"
        )
    try:
        said = subprocess.run(
            ["scontrol", "show", "hostnames", listed], capture_output=True, text=True, check=True
        )
    except OSError as error:
        raise CommandError(
            f"scontrol cannot be run: {error.strerror}; is Slurm installed here?"
        ) from error
    except subprocess.CalledProcessError as error:
        raise CommandError(
            f"scontrol does not understand the nodes {listed!r}: {error.stderr.strip()}"
        ) from error
    return said.stdout.split()


def in_allocation(request: LaunchRequest, found: list[str]) -> LaunchRequest:
    """The request with its hosts in the allocation's order: those of the hostfile, or the first so
    many nodes.
    """
    if request.min_nodes != request.max_nodes:
        raise CommandError(
            "the launcher slurm cannot start a node again; elastic runs need --launcher ssh"
        )
    if strangers := [host.name for host in request.hosts if host.name not in found]:
        raise CommandError(
            f"host {strangers[0]!r} of the hostfile is not in the allocation: {', '.join(found)}"
        )
    if request.max_nodes > len(found):
        raise CommandError(
            f"{request.max_nodes} hosts are asked for, but the allocation has {len(found)}"
        )
    chosen = {host.name: host for host in request.hosts} or {
        name: Host(name) for name in found[: request.max_nodes or None]
    }
    hosts = tuple(chosen[name] for name in found if name in chosen)
    return dataclasses.replace(request, hosts=hosts, min_nodes=len(hosts), max_nodes=len(hosts))


def command(request: LaunchRequest) -> list[str]:
    """What starts the agents: one task per node, with all that the allocation has there."""
    count = str(len(request.hosts))
    # The agents bind cores and end all processes themselves: srun must do neither, and the step
    # shares the allocation with others (--overlap), such as the one that this command runs in.
    return [
        *("srun", "--nodes", count, "--ntasks", count, "--ntasks-per-node", "1"),
        *("--nodelist", ",".join(host.name for host in request.hosts)),
        *("--export=ALL", "--mpi=none", "--cpu-bind=none", "--overlap", "--kill-on-bad-exit=0"),
        *request.launcher_args,
        *agent_command(request, NODE, settings="stdin", lifeline=True),
    ]


def ends(line: bytes) -> tuple[str, int] | None:
    """The node whose agent has ended badly; srun's own code would be the largest of all."""
    found = _ENDED.fullmatch(line)
    return (found[1].decode(errors="replace"), int(found[2])) if found else None


def explain(where: str, code: int) -> str:
    """What to say of an end of which no agent tells."""
    if where:
        return ""
    ended = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
    return f"srun {ended}: it could not start a node, or lost one (what it says is above)"
