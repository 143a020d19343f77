"""The options of ``dscore plan``, in the order of its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

# -- the model and the ranks

World = Annotated[
    int,
    typer.Option(
        "--world", min=1, metavar="N", rich_help_panel="Run", help="Data-parallel processes."
    ),
]

Params = Annotated[
    str | None,
    typer.Option(
        metavar="COUNT", rich_help_panel="Model", help="Parameters of the model, such as 7B."
    ),
]

LargestLayer = Annotated[
    str | None,
    typer.Option(
        metavar="COUNT",
        rich_help_panel="Model",
        help="With --params: parameters of the largest layer, such as 200M. Default: 1/32.",
    ),
]

Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        rich_help_panel="Model",
        help="module:function that builds the model, or the path of a Hugging Face config.json.",
    ),
]

# -- the run

Config = Annotated[
    Path | None,
    typer.Option(metavar="CONFIG", rich_help_panel="Run", help="The config of the run."),
]

Dtype = Annotated[
    Literal["fp32", "bf16", "fp16"] | None,
    typer.Option(
        metavar="DTYPE",
        rich_help_panel="Run",
        help="fp32, bf16 or fp16. Default: the config's; bf16 without one.",
    ),
]

OptimizerStates = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        rich_help_panel="Run",
        help="Elements that the optimizer keeps per parameter. Default: the config's; 2 (Adam).",
    ),
]

Gas = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel="Run",
        help="Micro-batches per step. Default: the config's; 1.",
    ),
]

Tokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel="Model",
        help="Tokens of one sequence: tell what activations take too. Needs --model.",
    ),
]

# -- the memory that there is

DeviceMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        rich_help_panel="Memory",
        help="Memory of one device, such as 80GB: recommend what fits.",
    ),
]

Reserve = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        rich_help_panel="Memory",
        help="Device memory to leave for activations, such as 20GB.",
    ),
]

HostMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        rich_help_panel="Memory",
        help="Of one host, such as 1TB. Default: no limit.",
    ),
]

RanksPerHost = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel="Memory",
        help="Processes that share a host's memory.",
    ),
]

# -- the answer

Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table; all in bytes.")]

Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Say what makes up the memory of the device, too.")
]

Svg = Annotated[
    Path | None,
    typer.Option(
        "--svg-folder",
        "--svg",
        metavar="FOLDER",
        help="Write drawings by plugins, such as timelines, into this folder.",
    ),
]

Against = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Compare with a run: the folder of its section memory_snapshot."
    ),
]
