"""``dscore run``: check the words, then hand a `LaunchRequest` to a launcher."""

from __future__ import annotations

import dataclasses
import logging
import os
import shlex
from enum import Enum
from typing import Annotated

import typer
from ds_command_kit.hosts.addresses import is_here
from ds_command_kit.hosts.settings import exported
from ds_command_kit.launch import LaunchRequest, parse_nodes, parse_nproc
from ds_command_kit.show import CommandError, say_error

from ds_cli.local.cores import parse_cores
from ds_cli.multi_host.agent import on_host
from ds_cli.run.host_choice import Choice, choose_hosts, slots_here
from ds_cli.run.launchers import check_program, check_script, find_launcher
from ds_cli.run.plugin_options import RunCommand


class Level(str, Enum):
    """What ``--log-level`` takes."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


ALIKE = {
    *(
        "script",
        "max_restarts",
        "rdzv_endpoint",
        "rdzv_id",
        "master_addr",
        "master_port",
        "tag",
        "grace",
        "notice",
    ),
    *("local_rank", "venv_script", "save_pid", "ssh_port", "show"),
}
"""The options that a `LaunchRequest` has under their names, as they were given."""


def run(
    ctx: typer.Context,
    script: Annotated[
        str,
        typer.Argument(
            metavar="SCRIPT", help="The Python file to run; with --module a module's name."
        ),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="The script's own arguments, untouched."),
    ] = None,
    nproc: Annotated[
        str,
        typer.Option(
            "--nproc",
            "--num-gpus",
            "--num-accelerators",
            help="Processes per machine; 'auto' is one per accelerator, or 1 without any.",
        ),
    ] = "auto",
    max_restarts: Annotated[
        int, typer.Option(min=0, help="How often to start all processes again after one fails.")
    ] = 0,
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in `python -m`.")
    ] = False,
    hostfile: Annotated[
        str,
        typer.Option(
            "--hostfile",
            "-H",
            metavar="FILE",
            help="Lines `name slots=K`. Default: /job/hostfile, where it exists.",
        ),
    ] = "",
    include: Annotated[
        str,
        typer.Option(
            "--include",
            "-i",
            metavar="HOST[:SLOT,SLOT]@HOST",
            help="The only hosts and slots to use.",
        ),
    ] = "",
    exclude: Annotated[
        str,
        typer.Option(
            "--exclude", "-e", metavar="HOST[:SLOT,SLOT]@HOST", help="Hosts and slots not to use."
        ),
    ] = "",
    launcher: Annotated[
        str,
        typer.Option(
            help="Who starts the processes; plugins add launchers. Default: ssh with a hostfile, "
            "else local."
        ),
    ] = "",
    launcher_args: Annotated[
        str,
        typer.Option(
            metavar="'ARGS'",
            help="More arguments for the program that reaches the hosts, as one word.",
        ),
    ] = "",
    ssh_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="The port of ssh on the hosts.")
    ] = None,
    force_multi: Annotated[
        bool,
        typer.Option(
            "--force-multi", help="Use the launcher for hosts even where the only host is this one."
        ),
    ] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print what would be run where, and run nothing.")
    ] = False,
    nnodes: Annotated[
        str,
        typer.Option(
            "--nnodes",
            "--num-nodes",
            help="Machines: a number, or MIN:MAX for an elastic run. Default: all hosts.",
        ),
    ] = "",
    elastic_training: Annotated[
        bool,
        typer.Option(
            "--elastic-training",
            help="Go on when hosts die or come: --nnodes MIN:MAX in other words.",
        ),
    ] = False,
    min_elastic_nodes: Annotated[
        int, typer.Option(help="With --elastic-training: the fewest; -1 is 1.")
    ] = -1,
    max_elastic_nodes: Annotated[
        int, typer.Option(help="With --elastic-training: the most; -1 is all.")
    ] = -1,
    node_rank: Annotated[
        int | None,
        typer.Option(min=-1, help="Which of the machines this one is, from 0; -1 as if left out."),
    ] = None,
    no_ssh: Annotated[
        bool,
        typer.Option(
            "--no-ssh", help="This command is started on every host, with its --node-rank."
        ),
    ] = False,
    no_ssh_check: Annotated[
        bool,
        typer.Option(
            "--no-ssh-check", help="Without effect: hosts are not tried before they are used."
        ),
    ] = False,
    rdzv_endpoint: Annotated[
        str, typer.Option(metavar="HOST[:PORT]", help="Where the machines meet; the same on each.")
    ] = "",
    rdzv_id: Annotated[
        str,
        typer.Option(help="Tells runs apart that meet at one endpoint; the same on each machine."),
    ] = "dscore",
    master_addr: Annotated[
        str,
        typer.Option(help="Address of machine 0, when machines have fixed ranks (--node-rank)."),
    ] = "",
    master_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port of rank 0's store; a free one when left out."),
    ] = None,
    tag: Annotated[
        bool, typer.Option("--tag", help="Put the rank before every line of output.")
    ] = False,
    grace: Annotated[
        float,
        typer.Option(
            min=0, max=30, help="Seconds that processes get to end by themselves before a kill."
        ),
    ] = 5.0,
    notice: Annotated[
        float,
        typer.Option(
            min=0, help="The same after SIGTERM: what a scheduler gives, to save a checkpoint."
        ),
    ] = 30.0,
    local_rank: Annotated[
        bool,
        typer.Option(
            "--local-rank/--no-local-rank",
            help="Pass --local_rank=i to the script, for scripts that do not read LOCAL_RANK.",
        ),
    ] = False,
    no_python: Annotated[
        bool, typer.Option("--no-python", help="SCRIPT is a program, run as it is.")
    ] = False,
    save_pid: Annotated[
        bool,
        typer.Option(
            "--save-pid", help="Keep this process's id in <temporary folder>/<id>.dscore."
        ),
    ] = False,
    each_rank_log: Annotated[
        str,
        typer.Option(
            "--enable-each-rank-log",
            metavar="DIR",
            help="Write each rank's output to a file in DIR.",
        ),
    ] = "",
    bind_cores: Annotated[
        bool,
        typer.Option("--bind-cores-to-rank", help="Tie each process to its share of the cores."),
    ] = False,
    core_list: Annotated[
        str,
        typer.Option(
            "--bind-core-list", metavar="0-7,16", help="The cores to share; implies binding."
        ),
    ] = "",
    venv_script: Annotated[
        str,
        typer.Option(
            metavar="FILE", help="Source FILE (activate of an environment) first, in bash."
        ),
    ] = "",
    log_level: Annotated[
        Level, typer.Option(help="How much the launcher itself says.", case_sensitive=False)
    ] = Level.WARNING,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="As --log-level error.")] = False,
) -> None:
    """Run a script on all accelerators of this machine, or on several machines.

    Everything after SCRIPT belongs to the script. The exit code is that of the first process that
    fails.
    """
    if no_python and module:
        raise CommandError(
            "--no-python and --module say different things of SCRIPT; give one of them"
        )
    if tag and each_rank_log:
        raise CommandError(
            "--tag and --enable-each-rank-log are two ways to tell ranks apart; give one of them"
        )
    if no_python:
        if not venv_script:  # which may bring it
            check_program(script)
    elif not module:
        check_script(script)
    min_nodes, max_nodes = _elastic(
        parse_nodes(nnodes), elastic_training, min_elastic_nodes, max_elastic_nodes
    )
    count = parse_nproc(nproc)
    request = LaunchRequest(
        **{name: value for name, value in ctx.params.items() if name in ALIKE},
        arguments=tuple(arguments or ()),
        is_module=module,
        nproc=count,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        node_rank=None if node_rank == -1 else node_rank,
        is_command=no_python,
        log_folder=each_rank_log,
        bind=bind_cores,
        cores=tuple(parse_cores(core_list)) if core_list else (),
        level=max(logging.ERROR if quiet else logging.NOTSET, getattr(logging, log_level.name)),
        launcher_args=_split(launcher_args),
    )
    by_hand = no_ssh or request.node_rank is not None or bool(rdzv_endpoint)
    choice = Choice(hostfile, include, exclude, max_nodes, count)
    if hostfile or not ((by_hand and not no_ssh) or launcher == "local"):
        request = dataclasses.replace(request, hosts=choose_hosts(choice))
    if by_hand and (request.hosts or no_ssh) and launcher not in ("", "local"):
        raise CommandError(
            f"--launcher {launcher} starts all hosts; leave out --no-ssh, --node-rank, "
            "--rdzv-endpoint"
        )
    if request.hosts:
        name, request = _with_hosts(request, launcher or "ssh", by_hand, force_multi)
    else:
        name = launcher or "local"
        request = dataclasses.replace(request, slots=slots_here(include, exclude))
    if name == "local":
        request = _checked_here(request)
    else:
        request = dataclasses.replace(request, exported=exported(os.environ))
    if no_ssh_check and request.level <= logging.INFO:
        say_error("--no-ssh-check has no effect: hosts are not tried before they are used")
    raise typer.Exit(find_launcher(name)(request))


def _split(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise CommandError(f"--launcher-args {text!r}: {error}") from error


def _elastic(nodes: tuple[int, int], wanted: bool, fewest: int, most: int) -> tuple[int, int]:
    """The bounds on machines; (0, 0): not told.

    ``--elastic-training`` without a most: MIN:0, all hosts.
    """
    if not wanted:
        if fewest != -1 or most != -1:
            raise CommandError(
                "--min-elastic-nodes and --max-elastic-nodes need --elastic-training"
            )
        return nodes
    low = max(fewest, 1)
    high = max(most, 0) or nodes[1]
    if high and low > high:
        raise CommandError(f"--min-elastic-nodes {low} is more than {high}, the most")
    return low, high


def _with_hosts(
    request: LaunchRequest, launcher: str, by_hand: bool, force: bool
) -> tuple[str, LaunchRequest]:
    """The launcher's name, and the request with its numbers of machines; for one that is this
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
            "--master-addr on one machine needs --master-port too; leave both out for a free port"
        )
    count = len(request.slots) if request.slots is not None else request.nproc
    return dataclasses.replace(request, min_nodes=low, max_nodes=most, nproc=count)


class _Run(RunCommand):
    function = staticmethod(run)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
# Options may be spelt with underscores too, as in the documents.
app.command(
    cls=_Run,
    context_settings={
        "allow_interspersed_args": False,
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)(run)
