"""The command ``deepspeed``: DeepSpeed's documented flags, carried out by ``dscore run``.

Each process gets DS_CORE_AS_DEEPSPEED=1, so that ``import deepspeed`` in the script gives ds_core,
and with it the variables LOCAL_SIZE, CROSS_RANK and CROSS_SIZE.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ds_command_kit.hosts.hostfile import filter_hosts, read_hostfile

from ds_deepspeed_compat.constants import DLTS_HOSTFILE
from ds_deepspeed_compat.finder import VARIABLE, displaced

LAUNCHERS = ("ssh", "pdsh", "openmpi", "mpich", "impi", "slurm", "mvapich")


def fetch_hostfile(hostfile_path: str) -> dict[str, int] | None:
    """Host -> slots, in the file's order; None when there is no such file.

    Raises ValueError, naming file and line.
    """
    return read_hostfile(hostfile_path)


def parse_resource_filter(
    host_info: Mapping[str, list[int]], include_str: str = "", exclude_str: str = ""
) -> dict[str, list[int]]:
    """Host -> slots to use: only those of `include_str`, or all but those of `exclude_str`.

    Raises ValueError.
    """
    return filter_hosts(host_info, include_str, exclude_str)


def parse_inclusion_exclusion(
    resource_pool: Mapping[str, int], inclusion: str, exclusion: str
) -> dict[str, list[int]]:
    """`parse_resource_filter` of hosts and their numbers of slots."""
    return filter_hosts(
        {host: list(range(slots)) for host, slots in resource_pool.items()}, inclusion, exclusion
    )


def parse_node_config(node_config: str) -> tuple[str, list[int]]:
    """``"host:0,2"`` -> ("host", [0, 2]); without slots the list is empty. Raises ValueError."""
    host, _, slots = node_config.partition(":")
    return host, [int(slot) for slot in slots.split(",")] if slots else []


def parse_node_config_list(node_config_list: str) -> dict[str, list[int]]:
    """``"a:0@b:1,2"`` -> host -> slots, in order, each once. Raises ValueError."""
    found: dict[str, set[int]] = {}
    for host, slots in map(parse_node_config, node_config_list.split("@")):
        found.setdefault(host, set()).update(slots)
    return {host: sorted(slots) for host, slots in found.items()}


def apply_num_nodes_and_gpus(
    active_resources: Mapping[str, list[int]], num_nodes: int, num_gpus: int
) -> dict[str, list[int]]:
    """The first `num_nodes` hosts, each with the slots 0 to `num_gpus` - 1; a number below 1 leaves
    what is given.
    """
    hosts = list(active_resources)[: num_nodes if num_nodes > 0 else None]
    return {
        host: list(range(num_gpus)) if num_gpus > 0 else active_resources[host] for host in hosts
    }


def encode_world_info(world_info: Mapping[str, list[int]]) -> str:
    """Hosts and slots as one word: JSON in base64, as ``--world_info`` has it."""
    return base64.urlsafe_b64encode(json.dumps(world_info).encode()).decode()


def _flag(*names: str, **how: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The arguments of `argparse.ArgumentParser.add_argument`."""
    return names, how


_FLAGS = (
    _flag(
        "-H",
        "--hostfile",
        default=DLTS_HOSTFILE,
        help="lines `name slots=K`; without the file: this machine",
    ),
    _flag(
        "-i",
        "--include",
        default="",
        metavar="HOST[:SLOT,SLOT]@HOST",
        help="the only hosts and slots to use",
    ),
    _flag(
        "-e",
        "--exclude",
        default="",
        metavar="HOST[:SLOT,SLOT]@HOST",
        help="hosts and slots not to use",
    ),
    _flag("--num_nodes", type=int, default=-1, help="use the first so many hosts"),
    _flag(
        "--num_gpus",
        "--num_accelerators",
        type=int,
        default=-1,
        help="processes per host; -1: one per accelerator",
    ),
    _flag(
        "--min_elastic_nodes",
        type=int,
        default=-1,
        help="with --elastic_training: the fewest hosts",
    ),
    _flag(
        "--max_elastic_nodes",
        type=int,
        default=-1,
        help="with --elastic_training: the most hosts",
    ),
    _flag("--elastic_training", action="store_true", help="restart when hosts come and go"),
    _flag("--master_addr", default="", help="address of the first host"),
    _flag(
        "--master_port",
        type=int,
        default=None,
        help="port there; on one host any free one, else 29500",
    ),
    _flag("--node_rank", type=int, default=-1, help="with --no_ssh: which host this is, from 0"),
    _flag(
        "--no_ssh",
        action="store_true",
        help="this same command is started on every host, with its --node_rank",
    ),
    _flag(
        "--no_ssh_check",
        action="store_true",
        help="without effect: hosts are not tried before they are used",
    ),
    _flag("--ssh_port", type=int, default=None, help="the port of ssh on the hosts"),
    _flag(
        "--launcher",
        default="",
        type=str.lower,
        choices=LAUNCHERS,
        help="who reaches the hosts; ssh unless told",
    ),
    _flag(
        "--launcher_args", default="", help="more arguments for the program that does, as one word"
    ),
    _flag(
        "--force_multi",
        action="store_true",
        help="use the launcher even where the only host is this one",
    ),
    _flag("--module", action="store_true", help="the script is a module, as in `python -m`"),
    _flag("--no_python", action="store_true", help="the script is a program, run as it is"),
    _flag("--no_local_rank", action="store_true", help="do not pass --local_rank=i to the script"),
    _flag("--save_pid", action="store_true", help="keep the launcher's process id in a file"),
    _flag(
        "--enable_each_rank_log",
        default=None,
        metavar="DIR",
        help="each rank's output goes to a file in DIR",
    ),
    _flag(
        "--autotuning",
        default="",
        choices=("tune", "run"),
        help="find the fastest settings first; run: and use them",
    ),
    _flag(
        "--bind_cores_to_rank",
        action="store_true",
        help="tie each process to its share of the cores",
    ),
    _flag("--bind_core_list", default=None, metavar="0-7,16", help="the cores to share"),
    _flag("--venv_script", default=None, metavar="FILE", help="source FILE first"),
    _flag("--log_level", default="warning", help="how much the launcher says"),
    _flag("-q", "--quiet", action="store_true", help="as --log_level error"),
)
"""The options of DeepSpeed's launcher."""


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what comes after the script is the script's own."""
    parser = argparse.ArgumentParser(
        prog="deepspeed", description="Run a script on all accelerators; see `dscore run`."
    )
    flags = [parser.add_argument(*names, **how) for names, how in _FLAGS]
    parser.add_argument("user_script", metavar="SCRIPT", help="the script to run")
    parser.add_argument(
        "user_args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments"
    )
    given = list(sys.argv[1:] if args is None else args)
    own = _script_at(given, flags) + 1
    found = parser.parse_args(given[:own])
    found.user_args += given[own:]
    _refuse(parser, found)
    return found


def _script_at(given: Sequence[str], flags: Sequence[argparse.Action]) -> int:
    """The index of the first word that is neither one of `flags` nor its value: the script.

    What follows is not shown to argparse, which would take the script's options for the beginnings
    of ours.
    """
    at = 0
    while at < len(given) and given[at].startswith("-"):
        name, joined, _ = given[at].partition("=")
        fitting = [flag for flag in flags if name in flag.option_strings]
        if not fitting and name.startswith("--"):
            fitting = [
                flag
                for flag in flags
                if any(option.startswith(name) for option in flag.option_strings)
            ]
        # A flag with a value, written as two words.
        takes_next = len(fitting) == 1 and fitting[0].nargs != 0 and not joined
        at += 2 if takes_next else 1
    return at


def _refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a message about what does not go together."""
    if (args.num_nodes >= 0 or args.num_gpus >= 0) and (args.include or args.exclude):
        parser.error("--num_nodes and --num_gpus do not go together with --include and --exclude")
    bounds = 1 <= args.min_elastic_nodes <= args.max_elastic_nodes
    if args.elastic_training and not _hostfile(args) and not (bounds and args.master_addr):
        parser.error(
            "--elastic_training without a hostfile needs --min_elastic_nodes, --max_elastic_nodes "
            "and --master_addr"
        )


def words(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The words of ``dscore run`` for these arguments, and variables that the processes get
    besides.
    """
    # `dscore run` has every option of DeepSpeed's launcher, under names of its own.
    found = ["run", *_meeting(args)]
    flags = {
        "--module": args.module,
        "--no-python": args.no_python,
        "--local-rank": not args.no_local_rank,
        "--save-pid": args.save_pid,
        "--bind-cores-to-rank": args.bind_cores_to_rank,
        "--quiet": args.quiet,
        "--force-multi": args.force_multi,
        "--no-ssh-check": args.no_ssh_check,
    }
    found += [flag for flag, wanted in flags.items() if wanted]
    options = {
        "--nproc": str(args.num_gpus) if args.num_gpus > 0 else "",
        "--include": args.include,
        "--exclude": args.exclude,
        "--launcher": args.launcher,
        "--launcher-args": args.launcher_args,
        "--ssh-port": args.ssh_port and str(args.ssh_port),
        "--enable-each-rank-log": args.enable_each_rank_log,
        "--bind-core-list": args.bind_core_list,
        "--venv-script": args.venv_script,
        "--log-level": args.log_level,
        "--autotuning": args.autotuning,
    }
    found += [f"{flag}={value}" for flag, value in options.items() if value]
    return [*found, args.user_script, *args.user_args], {VARIABLE: "1"}


def _hostfile(args: argparse.Namespace) -> bool:
    """Whether there is one, or one was named (that it does not exist is for ``dscore run`` to say).

    One that is no regular file, such as /dev/null, means this machine alone.
    """
    if os.path.exists(args.hostfile):
        return os.path.isfile(args.hostfile)
    return bool(args.hostfile != DLTS_HOSTFILE)


def _meeting(args: argparse.Namespace) -> list[str]:
    """Which hosts, and where they meet."""
    port = args.master_port or 29500
    found = []
    # Without a list of hosts they meet at an address, as with torchrun.
    if args.elastic_training and not _hostfile(args):
        nodes = f"{args.min_elastic_nodes}:{args.max_elastic_nodes}"
        return [f"--nnodes={nodes}", f"--rdzv-endpoint={args.master_addr}:{port}"]
    if _hostfile(args):
        found += [f"--hostfile={args.hostfile}", *["--no-ssh"] * args.no_ssh]
    if args.elastic_training:
        found += ["--elastic-training", f"--min-elastic-nodes={args.min_elastic_nodes}"]
        found += [f"--max-elastic-nodes={args.max_elastic_nodes}"]
    # Only a job of several hosts has an address where they meet; on one host any free port will do.
    several = args.num_nodes > 1 or args.no_ssh
    if args.num_nodes > 0:
        found.append(f"--nnodes={args.num_nodes}")
    if args.node_rank >= 0:
        found.append(f"--node-rank={args.node_rank}")
    if args.master_addr and (several or _hostfile(args)):
        found.append(f"--master-addr={args.master_addr}")
    if args.master_port is not None or several:
        found.append(f"--master-port={port}")
    return found


def main(args: Sequence[str] | None = None) -> None:
    """The command.

    Where a real DeepSpeed is installed too, its launcher runs, unless DS_CORE_AS_DEEPSPEED is set.
    """
    if displaced() is not None and os.environ.get(VARIABLE, "0") in ("", "0"):
        print(
            f"deepspeed: the installed DeepSpeed runs; {VARIABLE}=1 asks for ds_core",
            file=sys.stderr,
        )
        from deepspeed.launcher.runner import main as real  # type: ignore[import-not-found]

        real(args)
        return
    from ds_command_kit.app import make_app

    given = parse_args(args)
    if given.hostfile != DLTS_HOSTFILE and not _hostfile(given):
        text = (
            f"deepspeed: the hostfile {given.hostfile!r} is no regular file; the run is on "
            "this machine alone"
        )
        print(text, file=sys.stderr)
    command, variables = words(given)
    os.environ.update(variables)
    make_app()(command, prog_name="deepspeed")


if __name__ == "__main__":
    main()
