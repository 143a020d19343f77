"""Hands the request to `driver`, in a process of its own: ray takes over its process's signals,
logging and end.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

from ds_command_kit.hosts import run_tool, settings_line
from ds_command_kit.show import CommandError

if TYPE_CHECKING:
    from ds_command_kit.launch import LaunchRequest


def launch(request: LaunchRequest) -> int:
    """Start the agents on nodes of the cluster and wait for them; the run's exit code."""
    if importlib.util.find_spec("ray") is None:
        raise CommandError("the launcher ray needs ray, of the cluster's version: pip install ray")
    if request.min_nodes != request.max_nodes:
        raise CommandError(
            "the launcher ray starts a fixed number of hosts; for an elastic run use the "
            "launcher ssh"
        )
    if request.ssh_port is not None:
        raise CommandError("--ssh-port: the launcher ray reaches no host by ssh")
    hosts = [
        word
        for host in request.hosts
        for word in ("--host", f"{host.address}={len(host.slots or ()) or ''}")
    ]
    argv = [sys.executable, "-m", "ds_launcher_ray.driver", *hosts, *request.launcher_args]
    return run_tool(request, argv, feed=settings_line(request), lifeline=True)
