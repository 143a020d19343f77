"""The command ``deepspeed``: DeepSpeed's documented flags, carried out by ``dscore run``.

Each process gets DS_CORE_AS_DEEPSPEED=1, so that ``import deepspeed`` in the script gives ds_core, and with it the
variables LOCAL_SIZE, CROSS_RANK and CROSS_SIZE.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from ds_deepspeed_compat.constants import DLTS_HOSTFILE
from ds_deepspeed_compat.finder import VARIABLE, displaced
from ds_deepspeed_compat.hosts import fetch_hostfile, parse_resource_filter

__all__ = ["main", "parse_args", "words"]

LAUNCHERS = ("pdsh", "openmpi", "mpich", "impi", "slurm", "mvapich")


def parse_args(args: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; what comes after the script is the script's own."""
    parser = argparse.ArgumentParser(
        prog="deepspeed", description="Run a script on all accelerators; see `dscore run`."
    )
    add = parser.add_argument
    add("-H", "--hostfile", default=DLTS_HOSTFILE, help="lines `name slots=K`; without the file: this machine")
    add("-i", "--include", default="", metavar="HOST[:SLOT,SLOT]@HOST", help="the only hosts and slots to use")
    add("-e", "--exclude", default="", metavar="HOST[:SLOT,SLOT]@HOST", help="hosts and slots not to use")
    add("--num_nodes", type=int, default=-1, help="use the first so many hosts")
    add("--num_gpus", "--num_accelerators", type=int, default=-1, help="processes per host; -1: one per accelerator")
    add("--min_elastic_nodes", type=int, default=-1, help="with --elastic_training: the fewest machines")
    add("--max_elastic_nodes", type=int, default=-1, help="with --elastic_training: the most machines")
    add("--elastic_training", action="store_true", help="restart when machines come and go")
    add("--master_addr", default="", help="address of the first host")
    add("--master_port", type=int, default=None, help="port there; on one machine any free one, else 29500")
    add("--node_rank", type=int, default=-1, help="with --no_ssh: which host this is, from 0")
    add("--no_ssh", action="store_true", help="this same command is started on every host")
    add("--no_ssh_check", action="store_true", help="without effect: no host is reached by ssh")
    add("--ssh_port", type=int, default=None, help="not built")
    add("--launcher", default="pdsh", type=str.lower, choices=LAUNCHERS, help="for several hosts; not built")
    add("--launcher_args", default="", help="for several hosts; not built")
    add("--force_multi", action="store_true", help="not built")
    add("--module", action="store_true", help="the script is a module, as in `python -m`")
    add("--no_python", action="store_true", help="the script is a program, run as it is")
    add("--no_local_rank", action="store_true", help="do not pass --local_rank=i to the script")
    add("--save_pid", action="store_true", help="keep the launcher's process id in a file")
    add("--enable_each_rank_log", default=None, metavar="DIR", help="each rank's output goes to a file in DIR")
    add("--autotuning", default="", choices=("tune", "run"), help="not built")
    add("--bind_cores_to_rank", action="store_true", help="tie each process to its share of the cores")
    add("--bind_core_list", default=None, metavar="0-7,16", help="the cores to share")
    add("--venv_script", default=None, metavar="FILE", help="source FILE first")
    add("--log_level", default="warning", help="how much the launcher says")
    add("-q", "--quiet", action="store_true", help="as --log_level error")
    add("user_script", metavar="SCRIPT", help="the script to run")
    add("user_args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")
    found = parser.parse_args(args)
    _refuse(parser, found)
    return found


def _refuse(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a message about what is not built, or does not go together."""
    if args.autotuning:
        parser.error("--autotuning is not built; `dscore plan` says which stage fits")
    if args.force_multi:
        parser.error("--force_multi: no host is reached by ssh; start `deepspeed --no_ssh` on each")
    if (args.num_nodes >= 0 or args.num_gpus >= 0) and (args.include or args.exclude):
        parser.error("--num_nodes and --num_gpus do not go together with --include and --exclude")
    if args.elastic_training and not (1 <= args.min_elastic_nodes <= args.max_elastic_nodes and args.master_addr):
        parser.error("--elastic_training needs --min_elastic_nodes, --max_elastic_nodes and --master_addr")


def words(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The words of ``dscore run`` for these arguments, and variables that the processes get besides."""
    slots, count = _hosts(args)
    found = ["run"]
    variables = {VARIABLE: "1"}
    if args.num_gpus > 0:
        found += ["--nproc", str(args.num_gpus)]
    elif slots is not None:
        found += ["--nproc", str(len(slots))]
        if args.include or args.exclude:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
    found += _meeting(args, count)
    flags = {
        "--module": args.module,
        "--no-python": args.no_python,
        "--local-rank": not args.no_local_rank,
        "--save-pid": args.save_pid,
        "--bind-cores-to-rank": args.bind_cores_to_rank,
        "--quiet": args.quiet,
    }
    found += [flag for flag, wanted in flags.items() if wanted]
    options = {
        "--enable-each-rank-log": args.enable_each_rank_log,
        "--bind-core-list": args.bind_core_list,
        "--venv-script": args.venv_script,
        "--log-level": args.log_level,
    }
    found += [word for flag, value in options.items() if value for word in (flag, value)]
    return [*found, args.user_script, *args.user_args], variables


def _meeting(args: argparse.Namespace, count: int) -> list[str]:
    """How the machines meet."""
    port = args.master_port or 29500
    if args.elastic_training:
        nodes = f"{args.min_elastic_nodes}:{args.max_elastic_nodes}"
        return ["--nnodes", nodes, "--rdzv-endpoint", f"{args.master_addr}:{port}"]
    if count == 1:
        return ["--master-port", str(port)] if args.master_port is not None else []
    return [
        *("--nnodes", str(count), "--node-rank", str(args.node_rank)),
        *("--master-addr", args.master_addr, "--master-port", str(port)),
    ]


def _hosts(args: argparse.Namespace) -> tuple[list[int] | None, int]:
    """This machine's slots (None: not told), and how many machines there are."""
    hosts = fetch_hostfile(args.hostfile)
    if hosts is None:
        if args.hostfile != DLTS_HOSTFILE:
            raise ValueError(f"there is no hostfile {args.hostfile!r}")
        if not (args.include or args.exclude):
            return None, _several(args, max(args.num_nodes, 1))
        hosts = {"localhost": _devices()}
    chosen = parse_resource_filter({h: list(range(n)) for h, n in hosts.items()}, args.include, args.exclude)
    if not chosen:
        raise ValueError("the filters leave no host")
    if args.num_nodes > len(chosen):
        raise ValueError(f"--num_nodes {args.num_nodes}, but there are {len(chosen)} hosts")
    rows = list(chosen.values())[: args.num_nodes if args.num_nodes > 0 else None]
    count = _several(args, len(rows))
    if not args.master_addr and count > 1:
        args.master_addr = next(iter(chosen))
    return rows[args.node_rank if count > 1 else 0], count


def _several(args: argparse.Namespace, count: int) -> int:
    """`count`, if there is a way to start so many machines."""
    if count > 1 and (not args.no_ssh or not 0 <= args.node_rank < count):
        raise ValueError(
            f"{count} machines, which are not started by ssh: run the same command on each of them with --no_ssh, "
            f"--node_rank 0 to {count - 1} and --master_addr HOST"
        )
    if count > 1 and not args.master_addr and not os.path.isfile(args.hostfile):
        raise ValueError(f"{count} machines need --master_addr HOST")
    return count


def _devices() -> int:
    from ds_core.accelerator import get_accelerator

    return max(1, get_accelerator().device_count())


def main(args: Sequence[str] | None = None) -> None:
    """The command. Where a real DeepSpeed is installed too, its launcher runs, unless DS_CORE_AS_DEEPSPEED is set."""
    if displaced() is not None and os.environ.get(VARIABLE, "0") in ("", "0"):
        print(f"deepspeed: the installed DeepSpeed runs; {VARIABLE}=1 asks for ds_core", file=sys.stderr)
        from deepspeed.launcher.runner import main as real  # type: ignore[import-not-found]

        real(args)
        return
    from ds_cli.app import make_app

    parsed = parse_args(args)
    try:
        command, variables = words(parsed)
    except ValueError as error:
        sys.exit(f"deepspeed: {error}")
    os.environ.update(variables)
    make_app()(command, prog_name="deepspeed")


if __name__ == "__main__":
    main()
