"""The hosts of a launcher that takes them from the hostfile (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_command_kit.hosts.hostfile import Host
from ds_command_kit.show import CommandError

if TYPE_CHECKING:
    from ds_command_kit.launch import LaunchRequest


def named_hosts(request: LaunchRequest, launcher: str, users: bool = False) -> tuple[Host, ...]:
    """The hosts, for a launcher that takes them from the hostfile and cannot add any later.

    Raises CommandError.

    users: ``user@host`` is understood.
    """
    if not request.hosts:
        raise CommandError(
            f"the launcher {launcher} needs --hostfile FILE, with a line `name slots=K` for each "
            "host"
        )
    if request.min_nodes != request.max_nodes:
        raise CommandError(
            f"the launcher {launcher} cannot start a host again; elastic runs need --launcher ssh"
        )
    if not users and (named := next((host.name for host in request.hosts if "@" in host.name), "")):
        raise CommandError(
            f"the launcher {launcher} takes no user's name as in {named!r}; put it into "
            "~/.ssh/config"
        )
    return request.hosts
