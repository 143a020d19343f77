"""The options of ``dscore run``, each with its spellings and its line of help.

An option's type is that of the value which `ds_cli.run.command.run` is given.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer


class Level(str, Enum):
    """What ``--log-level`` accepts."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


# -- what is run -----------------------------------------------------------------------------------

Script = Annotated[
    str,
    typer.Argument(metavar="SCRIPT", help="The Python file to run; with --module a module's name."),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ARGS]...", help="The script's own arguments, untouched."),
]
Module = Annotated[
    bool,
    typer.Option("--module", "-m", help="SCRIPT is a module, as in `python -m`."),
]
NoPython = Annotated[
    bool,
    typer.Option("--no-python", help="SCRIPT is a program, run as it is."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Replace a key of the config, as in zero_optimization.stage=3; may be repeated.",
    ),
]
VenvScript = Annotated[
    str,
    typer.Option(metavar="FILE", help="Source FILE (activate of an environment) first, in bash."),
]
LocalRank = Annotated[
    bool,
    typer.Option(
        "--local-rank/--no-local-rank",
        help="Pass --local_rank=i to the script, for scripts that do not read LOCAL_RANK.",
    ),
]

# -- processes -------------------------------------------------------------------------------------

Nproc = Annotated[
    str,
    typer.Option(
        "--nproc",
        "--num-gpus",
        "--num-accelerators",
        help="Processes per machine; 'auto' is one per accelerator, or 1 without any.",
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(min=0, help="How often to start all processes again after one fails."),
]
Grace = Annotated[
    float,
    typer.Option(
        min=0, max=30, help="Seconds that processes get to end by themselves before a kill."
    ),
]
Notice = Annotated[
    float,
    typer.Option(
        min=0, help="The same after SIGTERM: what a scheduler gives, to save a checkpoint."
    ),
]
BindCores = Annotated[
    bool,
    typer.Option("--bind-cores-to-rank", help="Tie each process to its share of the cores."),
]
CoreList = Annotated[
    str,
    typer.Option("--bind-core-list", metavar="0-7,16", help="The cores to share; implies binding."),
]

# -- hosts -----------------------------------------------------------------------------------------

Hostfile = Annotated[
    str,
    typer.Option(
        "--hostfile",
        "-H",
        metavar="FILE",
        help="Lines `name slots=K`. Default: /job/hostfile, where it exists.",
    ),
]
Include = Annotated[
    str,
    typer.Option(
        "--include",
        "-i",
        metavar="HOST[:SLOT,SLOT]@HOST",
        help="The only hosts and slots to use.",
    ),
]
Exclude = Annotated[
    str,
    typer.Option(
        "--exclude", "-e", metavar="HOST[:SLOT,SLOT]@HOST", help="Hosts and slots not to use."
    ),
]
LauncherName = Annotated[
    str,
    typer.Option(
        help="Who starts the processes; plugins add launchers. Default: ssh with a hostfile, "
        "else local."
    ),
]
LauncherArgs = Annotated[
    str,
    typer.Option(
        metavar="'ARGS'",
        help="More arguments for the program that reaches the hosts, as one word.",
    ),
]
SshPort = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="The port of ssh on the hosts."),
]
ForceMulti = Annotated[
    bool,
    typer.Option(
        "--force-multi", help="Use the launcher for hosts even where the only host is this one."
    ),
]
NoSshCheck = Annotated[
    bool,
    typer.Option(
        "--no-ssh-check", help="Without effect: hosts are not tried before they are used."
    ),
]
Show = Annotated[
    bool,
    typer.Option("--show", help="Print what would be run where, and run nothing."),
]

# -- how many hosts, and where they meet -----------------------------------------------------------

Nnodes = Annotated[
    str,
    typer.Option(
        "--nnodes",
        "--num-nodes",
        help="Machines: a number, or MIN:MAX for an elastic run. Default: all hosts.",
    ),
]
ElasticTraining = Annotated[
    bool,
    typer.Option(
        "--elastic-training",
        help="Go on when hosts die or come: --nnodes MIN:MAX in other words.",
    ),
]
MinElasticNodes = Annotated[
    int,
    typer.Option(help="With --elastic-training: the fewest; -1 is 1."),
]
MaxElasticNodes = Annotated[
    int,
    typer.Option(help="With --elastic-training: the most; -1 is all."),
]
NodeRank = Annotated[
    int | None,
    typer.Option(min=-1, help="Which of the machines this one is, from 0; -1 as if left out."),
]
NoSsh = Annotated[
    bool,
    typer.Option("--no-ssh", help="This command is started on every host, with its --node-rank."),
]
RdzvEndpoint = Annotated[
    str,
    typer.Option(metavar="HOST[:PORT]", help="Where the machines meet; the same on each."),
]
RdzvId = Annotated[
    str,
    typer.Option(help="Tells runs apart that meet at one endpoint; the same on each machine."),
]
MasterAddr = Annotated[
    str,
    typer.Option(help="Address of machine 0, when machines have fixed ranks (--node-rank)."),
]
MasterPort = Annotated[
    int | None,
    typer.Option(min=1, max=65535, help="Port of rank 0's store; a free one when left out."),
]

# -- output ----------------------------------------------------------------------------------------

Tag = Annotated[
    bool,
    typer.Option("--tag", help="Put the rank before every line of output."),
]
EachRankLog = Annotated[
    str,
    typer.Option(
        "--enable-each-rank-log",
        metavar="DIR",
        help="Write each rank's output to a file in DIR.",
    ),
]
SavePid = Annotated[
    bool,
    typer.Option("--save-pid", help="Keep this process's id in <temporary folder>/<id>.dscore."),
]
LogLevel = Annotated[
    Level,
    typer.Option(help="How much the launcher itself says.", case_sensitive=False),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", help="As --log-level error."),
]
