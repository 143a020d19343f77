"""Which launcher starts the processes of a `LaunchRequest`, and on which hosts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from ds_command_kit.hosts.addresses import is_here
from ds_command_kit.hosts.settings import exported
from ds_command_kit.launch import LaunchRequest
from ds_command_kit.show import CommandError

from ds_cli.multi_host.agent import on_host
from ds_cli.run.host_choice import Choice, choose_hosts, slots_here


def choose_launcher(request: LaunchRequest, given: Mapping[str, Any]) -> tuple[str, LaunchRequest]:
    """The launcher's name, and the request with its hosts. Raises CommandError.

    given: the values of the options of ``dscore run``, by name.
    """
    launcher: str = given["launcher"]
    no_ssh: bool = given["no_ssh"]
    # The user starts this command on every host, so no launcher has to reach any.
    by_hand = no_ssh or request.node_rank is not None or bool(request.rdzv_endpoint)
    # A default hostfile counts only where nothing says that the run is on this host alone.
    if given["hostfile"] or not ((by_hand and not no_ssh) or launcher == "local"):
        choice = Choice(
            given["hostfile"], given["include"], given["exclude"], request.max_nodes, request.nproc
        )
        request = dataclasses.replace(request, hosts=choose_hosts(choice))
    if by_hand and (request.hosts or no_ssh) and launcher not in ("", "local"):
        raise CommandError(
            f"--launcher {launcher} starts all hosts; leave out --no-ssh, --node-rank, "
            "--rdzv-endpoint"
        )
    if request.hosts:
        name, request = _with_hosts(request, launcher or "ssh", by_hand, given["force_multi"])
    else:
        name = launcher or "local"
        slots = slots_here(given["include"], given["exclude"])
        request = dataclasses.replace(request, slots=slots)
    if name == "local":
        return name, _checked_here(request)
    return name, dataclasses.replace(request, exported=exported(os.environ))


def _with_hosts(
    request: LaunchRequest, launcher: str, by_hand: bool, force: bool
) -> tuple[str, LaunchRequest]:
    """The launcher's name, and the request with its numbers of hosts; for one that is this
    machine alone.
    """
    most = len(request.hosts)
    low = request.min_nodes if request.min_nodes != request.max_nodes else most
    request = dataclasses.replace(request, min_nodes=low, max_nodes=most)
    if by_hand:
        if request.node_rank is None and not request.rdzv_endpoint:
            raise CommandError(
                f"--no-ssh needs --node-rank, 0 to {most - 1}: the same command is run on each host"
            )
        if request.node_rank is not None and request.node_rank >= most:
            raise CommandError(
                f"--node-rank {request.node_rank}, but there are {most} hosts; use 0 to {most - 1}"
            )
        return "local", on_host(
            request, request.node_rank
        ) if request.node_rank is not None else request
    if launcher == "local" and (most > 1 or not is_here(request.hosts[0].name)):
        raise CommandError(
            "--launcher local starts processes on this machine only; leave it out for the "
            "hostfile's"
        )
    if launcher != "local" and (force or most > 1 or not is_here(request.hosts[0].name)):
        return launcher, request
    alone = on_host(dataclasses.replace(request, node_rank=0), 0)
    return "local", dataclasses.replace(alone, node_rank=None, master_addr=request.master_addr)


def divide(request: LaunchRequest, world: int | None, launcher: str) -> LaunchRequest:
    """The request with the same number of processes on each host, `world` in all; None: as it
    is. Raises CommandError.
    """
    if world is None:
        return request
    count = len(request.hosts) or request.max_nodes
    if not count or request.min_nodes != request.max_nodes:
        why = "the run is elastic" if count else f"{launcher} decides how many hosts there are"
        raise CommandError(f"--world {world}: {why}; give --nproc, the processes of each host")
    each, rest = divmod(world, count)
    if rest:
        raise CommandError(f"--world {world} is not a multiple of {count}, the hosts")
    for name, slots in [(host.name, host.slots) for host in request.hosts] or [
        ("this host", request.slots)
    ]:
        if slots is not None and len(slots) < each:
            raise CommandError(
                f"--world {world} is {each} on each host, but {name} has {len(slots)} slots"
            )
    return dataclasses.replace(
        request,
        nproc=each,
        slots=None if request.slots is None else request.slots[:each],
        hosts=tuple(
            host if host.slots is None else dataclasses.replace(host, slots=host.slots[:each])
            for host in request.hosts
        ),
    )


def _checked_here(request: LaunchRequest) -> LaunchRequest:
    """The request to start processes on this machine, one of several or alone.

    Raises CommandError.
    """
    low = request.min_nodes or 1
    most = request.max_nodes or request.min_nodes or 1
    text = f"--nnodes {low}" + f":{most}" * (low != most)
    chosen = request.master_addr or request.master_port is not None
    if request.rdzv_endpoint and chosen:
        raise CommandError(
            "--rdzv-endpoint and --master-addr/--master-port are two ways to meet; give one of them"
        )
    if (
        most > 1
        and not request.rdzv_endpoint
        and (not request.master_addr or request.node_rank is None)
    ):
        raise CommandError(
            f"{text} needs a place to meet: --hostfile FILE, --rdzv-endpoint HOST:PORT, or "
            "--master-addr HOST and "
            "--node-rank"
        )
    if low != most and not request.rdzv_endpoint:
        raise CommandError(
            f"{text} is elastic and needs --hostfile FILE or --rdzv-endpoint HOST:PORT"
        )
    if request.node_rank is not None and request.node_rank >= most:
        raise CommandError(f"--node-rank {request.node_rank} with {text}; use 0 to {most - 1}")
    if request.master_addr and most == 1 and request.master_port is None:
        raise CommandError(
            "--master-addr on one host needs --master-port too; leave both out for a free port"
        )
    count = len(request.slots) if request.slots is not None else request.nproc
    return dataclasses.replace(request, min_nodes=low, max_nodes=most, nproc=count)
