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


PROCESSES = "Processes"
HOSTS = "Hosts"
ELASTIC = "Elastic"
OUTPUT = "Output"
DEEPSPEED = "DeepSpeed"
"""The headings of ``dscore run --help``."""

# -- what is run -----------------------------------------------------------------------------------

Script = Annotated[
    str,
    typer.Argument(metavar="SCRIPT", help="The Python file to run; with --module a module's name."),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ARGS]...", help="All that follows: the script's own arguments."),
]
Module = Annotated[
    bool,
    typer.Option(
        "--module", "-m", rich_help_panel=PROCESSES, help="SCRIPT is a module, as in `python -m`."
    ),
]
NoPython = Annotated[
    bool,
    typer.Option(
        "--no-python", rich_help_panel=PROCESSES, help="SCRIPT is a program, run as it is."
    ),
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
    typer.Option(
        metavar="FILE",
        rich_help_panel=PROCESSES,
        help="Source FILE (activate of an environment) first, in bash.",
    ),
]
LocalRank = Annotated[
    bool,
    typer.Option(
        "--local-rank/--no-local-rank",
        rich_help_panel=PROCESSES,
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
        metavar="N",
        rich_help_panel=PROCESSES,
        help="Processes per host; 'auto' is one per accelerator, or 1 without any.",
    ),
]
World = Annotated[
    int | None,
    typer.Option(
        "--world",
        min=1,
        metavar="N",
        rich_help_panel=PROCESSES,
        help="Processes in all, the same number on each host; instead of --nproc.",
    ),
]
MaxRestarts = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        rich_help_panel=PROCESSES,
        help="How often to start all processes again after one fails.",
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        min=0,
        max=30,
        metavar="SECONDS",
        rich_help_panel=PROCESSES,
        help="Seconds that processes get to end by themselves before a kill.",
    ),
]
Notice = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        rich_help_panel=PROCESSES,
        help="The same after SIGTERM: what a scheduler gives, to save a checkpoint.",
    ),
]
BindCores = Annotated[
    bool,
    typer.Option(
        "--bind-cores-to-rank",
        rich_help_panel=PROCESSES,
        help="Tie each process to its share of the cores.",
    ),
]
CoreList = Annotated[
    str,
    typer.Option(
        "--bind-core-list",
        metavar="0-7,16",
        rich_help_panel=PROCESSES,
        help="The cores to share; implies binding.",
    ),
]

# -- hosts -----------------------------------------------------------------------------------------

Hostfile = Annotated[
    str,
    typer.Option(
        "--hostfile",
        "-H",
        metavar="FILE",
        rich_help_panel=HOSTS,
        help="Lines `name slots=K`. Default: /job/hostfile, where it exists.",
    ),
]
Include = Annotated[
    str,
    typer.Option(
        "--include",
        "-i",
        metavar="HOST[:SLOT,SLOT]@HOST",
        rich_help_panel=HOSTS,
        help="The only hosts and slots to use.",
    ),
]
Exclude = Annotated[
    str,
    typer.Option(
        "--exclude",
        "-e",
        metavar="HOST[:SLOT,SLOT]@HOST",
        rich_help_panel=HOSTS,
        help="Hosts and slots not to use.",
    ),
]
LauncherName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        rich_help_panel=HOSTS,
        help="Who starts the processes; plugins add launchers. Default: ssh with a hostfile, "
        "else local.",
    ),
]
LauncherArgs = Annotated[
    str,
    typer.Option(
        metavar="'ARGS'",
        rich_help_panel=HOSTS,
        help="More arguments for the program that reaches the hosts, as one word.",
    ),
]
SshPort = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65535,
        metavar="PORT",
        rich_help_panel=HOSTS,
        help="The port of ssh on the hosts.",
    ),
]
ForceMulti = Annotated[
    bool,
    typer.Option(
        "--force-multi",
        rich_help_panel=DEEPSPEED,
        help="Use the launcher for hosts even where the only host is this one.",
    ),
]
NoSshCheck = Annotated[
    bool,
    typer.Option(
        "--no-ssh-check",
        rich_help_panel=DEEPSPEED,
        help="Without effect: hosts are not tried before they are used.",
    ),
]
Show = Annotated[
    bool,
    typer.Option(
        "--show", rich_help_panel=HOSTS, help="Print what would be run where, and run nothing."
    ),
]

# -- how many hosts, and where they meet -----------------------------------------------------------

Nnodes = Annotated[
    str,
    typer.Option(
        "--nnodes",
        "--num-nodes",
        metavar="N",
        rich_help_panel=HOSTS,
        help="Hosts: a number, or MIN:MAX for an elastic run. Default: all hosts.",
    ),
]
ElasticTraining = Annotated[
    bool,
    typer.Option(
        "--elastic-training",
        rich_help_panel=ELASTIC,
        help="Keep training when hosts are lost or join: the same as --nnodes MIN:MAX.",
    ),
]
MinElasticNodes = Annotated[
    int,
    typer.Option(
        metavar="N", rich_help_panel=ELASTIC, help="With --elastic-training: the fewest; -1 is 1."
    ),
]
MaxElasticNodes = Annotated[
    int,
    typer.Option(
        metavar="N", rich_help_panel=ELASTIC, help="With --elastic-training: the most; -1 is all."
    ),
]
NodeRank = Annotated[
    int | None,
    typer.Option(
        min=-1,
        metavar="N",
        rich_help_panel=HOSTS,
        help="Which of the hosts this one is, from 0; -1 as if left out.",
    ),
]
NoSsh = Annotated[
    bool,
    typer.Option(
        "--no-ssh",
        rich_help_panel=HOSTS,
        help="This command is started on every host, with its --node-rank.",
    ),
]
RdzvEndpoint = Annotated[
    str,
    typer.Option(
        metavar="HOST[:PORT]",
        rich_help_panel=HOSTS,
        help="Where the hosts meet; the same on each.",
    ),
]
RdzvId = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        rich_help_panel=HOSTS,
        help="Tells runs apart that meet at one endpoint; the same on each host.",
    ),
]
MasterAddr = Annotated[
    str,
    typer.Option(
        metavar="HOST",
        rich_help_panel=HOSTS,
        help="Address of host 0, when hosts have fixed ranks (--node-rank).",
    ),
]
MasterPort = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=65535,
        metavar="PORT",
        rich_help_panel=HOSTS,
        help="Port of rank 0's store; a free one when left out.",
    ),
]

# -- output ----------------------------------------------------------------------------------------

Tag = Annotated[
    bool,
    typer.Option("--tag", rich_help_panel=OUTPUT, help="Put the rank before every line of output."),
]
EachRankLog = Annotated[
    str,
    typer.Option(
        "--enable-each-rank-log",
        metavar="DIR",
        rich_help_panel=OUTPUT,
        help="Write each rank's output to a file in DIR.",
    ),
]
SavePid = Annotated[
    bool,
    typer.Option(
        "--save-pid",
        rich_help_panel=DEEPSPEED,
        help="Keep this process's id in <temporary folder>/<id>.dscore.",
    ),
]
LogLevel = Annotated[
    Level,
    typer.Option(
        metavar="LEVEL",
        rich_help_panel=OUTPUT,
        help="How much the launcher itself says: debug, info, warning, error or critical.",
        case_sensitive=False,
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", rich_help_panel=OUTPUT, help="As --log-level error."),
]
