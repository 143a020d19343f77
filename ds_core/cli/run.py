"""``dscore run``: check the words, then hand a `LaunchRequest` to a launcher."""

from __future__ import annotations

from typing import Annotated

import typer

from ds_core.cli.launch import LaunchRequest, check_script, find_launcher, parse_nodes, parse_nproc
from ds_core.cli.show import CommandError

__all__ = ["run"]


def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The Python file to run; with --module a module's name.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments, untouched.")
    ] = None,
    nproc: Annotated[
        str, typer.Option(help="Processes per machine; 'auto' is one per accelerator, or 1 without any.")
    ] = "auto",
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often to start all processes again after one fails.")
    ] = 0,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in `python -m`.")] = False,
    launcher: Annotated[str, typer.Option(help="Who starts the processes; plugins can add launchers.")] = "local",
    nnodes: Annotated[str, typer.Option(help="Machines: a number, or MIN:MAX for an elastic run.")] = "1",
    node_rank: Annotated[int | None, typer.Option(min=0, help="Which of the machines this one is, from 0.")] = None,
    rdzv_endpoint: Annotated[
        str, typer.Option(metavar="HOST[:PORT]", help="Where the machines meet; the same on each.")
    ] = "",
    rdzv_id: Annotated[
        str, typer.Option(help="Tells runs apart that meet at one endpoint; the same on each machine.")
    ] = "dscore",
    master_addr: Annotated[
        str, typer.Option(help="Address of machine 0, when machines have fixed ranks (--node-rank).")
    ] = "",
    master_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of rank 0's store; a free one when left out.")
    ] = None,
    tag: Annotated[bool, typer.Option("--tag", help="Put the rank before every line of output.")] = False,
    grace: Annotated[
        float, typer.Option(min=0, max=30, help="Seconds that processes get to end by themselves before a kill.")
    ] = 5.0,
) -> None:
    """Run a script on all accelerators of this machine, or on several machines.

    Everything after SCRIPT belongs to the script. The exit code is that of the first process that fails.
    """
    min_nodes, max_nodes = parse_nodes(nnodes)
    if rdzv_endpoint and (master_addr or master_port is not None):
        raise CommandError("--rdzv-endpoint and --master-addr/--master-port are two ways to meet; give one of them")
    if max_nodes > 1 and not rdzv_endpoint and (not master_addr or node_rank is None):
        raise CommandError(
            f"--nnodes {nnodes} needs a place to meet: --rdzv-endpoint HOST:PORT, or --master-addr HOST and --node-rank"
        )
    if min_nodes != max_nodes and not rdzv_endpoint:
        raise CommandError(f"--nnodes {nnodes} is elastic and needs --rdzv-endpoint HOST:PORT")
    if node_rank is not None and node_rank >= max_nodes:
        raise CommandError(f"--node-rank {node_rank} with --nnodes {nnodes}; use 0 to {max_nodes - 1}")
    if master_addr and max_nodes == 1 and master_port is None:
        raise CommandError("--master-addr on one machine needs --master-port too; leave both out for a free port")
    count = parse_nproc(nproc)
    if not module:
        check_script(script)
    request = LaunchRequest(
        script=script,
        arguments=tuple(arguments or ()),
        is_module=module,
        nproc=count,
        max_restarts=max_restarts,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_rank=node_rank,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
        master_addr=master_addr,
        master_port=master_port,
        tag=tag,
        grace=grace,
    )
    code = find_launcher(launcher)(request)
    raise typer.Exit(code)
