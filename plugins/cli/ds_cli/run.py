"""``dscore run``: check the words, then hand a `LaunchRequest` to a launcher."""

from __future__ import annotations

import base64
import importlib.util
import json
import logging
import os
from enum import Enum
from typing import Annotated

import typer

from ds_cli.launch import LaunchRequest, check_program, check_script, find_launcher, parse_nodes, parse_nproc
from ds_cli.show import CommandError
from ds_cli.surroundings import parse_cores

__all__ = ["Level", "app", "run"]


class Level(str, Enum):
    """What ``--log-level`` takes."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


def run(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The Python file to run; with --module a module's name.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments, untouched.")
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
    local_rank: Annotated[
        bool,
        typer.Option(
            "--local-rank/--no-local-rank",
            help="Pass --local_rank=i to the script, for scripts that do not read LOCAL_RANK.",
        ),
    ] = False,
    as_deepspeed: Annotated[
        bool, typer.Option("--as-deepspeed", help="`import deepspeed` in the script gives ds_core.")
    ] = False,
    record: Annotated[
        str, typer.Option("--record", metavar="FOLDER", help="Keep a record of the run in FOLDER, for dscore report.")
    ] = "",
    no_python: Annotated[bool, typer.Option("--no-python", help="SCRIPT is a program, run as it is.")] = False,
    save_pid: Annotated[
        bool, typer.Option("--save-pid", help="Keep this process's id in <temporary folder>/<id>.dscore.")
    ] = False,
    each_rank_log: Annotated[
        str, typer.Option("--enable-each-rank-log", metavar="DIR", help="Write each rank's output to a file in DIR.")
    ] = "",
    bind_cores: Annotated[
        bool, typer.Option("--bind-cores-to-rank", help="Tie each process to its share of the cores.")
    ] = False,
    core_list: Annotated[
        str, typer.Option("--bind-core-list", metavar="0-7,16", help="The cores to share; implies binding.")
    ] = "",
    venv_script: Annotated[
        str, typer.Option(metavar="FILE", help="Source FILE (activate of an environment) first, in bash.")
    ] = "",
    log_level: Annotated[
        Level, typer.Option(help="How much the launcher itself says.", case_sensitive=False)
    ] = Level.WARNING,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="As --log-level error.")] = False,
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
    if no_python and module:
        raise CommandError("--no-python and --module say different things of SCRIPT; give one of them")
    if tag and each_rank_log:
        raise CommandError("--tag and --enable-each-rank-log are two ways to tell ranks apart; give one of them")
    count = parse_nproc(nproc)
    if no_python:
        if not venv_script:  # which may bring it
            check_program(script)
    elif not module:
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
        local_rank=local_rank,
        is_command=no_python,
        log_folder=each_rank_log,
        bind=bind_cores,
        cores=tuple(parse_cores(core_list)) if core_list else (),
        venv_script=venv_script,
        save_pid=save_pid,
        level=max(logging.ERROR if quiet else logging.NOTSET, getattr(logging, log_level.name)),
    )
    if as_deepspeed:
        _as_deepspeed()
    if record:
        _record(record)
    code = find_launcher(launcher)(request)
    raise typer.Exit(code)


def _as_deepspeed() -> None:
    """Let the processes read the variable that the package of DeepSpeed's names looks for."""
    _needs("--as-deepspeed", "ds_deepspeed_compat", "ds-deepspeed-compat")
    os.environ["DS_CORE_AS_DEEPSPEED"] = "1"


def _record(folder: str) -> None:
    """Let the config of the processes have the section ``run_record``."""
    from ds_core.config import read_config

    _needs("--record", "ds_report", "ds-report")
    given = read_config(os.environ.get("DS_CONFIG_OVERRIDES") or {}).raw
    text = json.dumps({**given, "run_record": {"folder": os.path.abspath(folder)}})
    os.environ["DS_CONFIG_OVERRIDES"] = base64.urlsafe_b64encode(text.encode()).decode()


def _needs(option: str, package: str, dist: str) -> None:
    if importlib.util.find_spec(package) is None:
        from ds_core.catalogue import install

        raise CommandError(f"{option} needs {dist}, which is not installed: {install(dist)}")


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
# Options may be spelt with underscores too, as in the documents.
app.command(
    context_settings={"allow_interspersed_args": False, "token_normalize_func": lambda name: name.replace("_", "-")}
)(run)
