"""The options of ``dscore plan``, in the order of its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

# -- the model and the ranks

World = Annotated[int, typer.Option("--world", min=1, help="Data-parallel ranks.")]

Params = Annotated[str | None, typer.Option(help="Parameters of the model, such as 7B.")]

LargestLayer = Annotated[
    str | None,
    typer.Option(
        help="With --params: parameters of the largest layer, such as 200M. Default: 1/32."
    ),
]

Model = Annotated[
    str | None,
    typer.Option(
        help="module:function that builds the model, or the path of a Hugging Face config.json."
    ),
]

# -- the run

Config = Annotated[Path | None, typer.Option(help="The config of the run.")]

Dtype = Annotated[
    Literal["fp32", "bf16", "fp16"] | None,
    typer.Option(help="Default: the config's; bf16 without one."),
]

OptimizerStates = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Elements that the optimizer keeps per parameter. Default: the config's; 2 (Adam).",
    ),
]

Gas = Annotated[
    int | None, typer.Option(min=1, help="Micro-batches per step. Default: the config's; 1.")
]

Tokens = Annotated[
    int | None,
    typer.Option(
        min=1, help="Tokens of one sequence: tell what activations take too. Needs --model."
    ),
]

# -- the memory that there is

DeviceMemory = Annotated[
    str | None, typer.Option(help="Memory of one device, such as 80GB: recommend what fits.")
]

Reserve = Annotated[str, typer.Option(help="Device memory to leave for activations, such as 20GB.")]

HostMemory = Annotated[
    str | None, typer.Option(help="Of one machine, such as 1TB. Default: no limit.")
]

RanksPerHost = Annotated[int, typer.Option(min=1, help="Ranks that share a machine's memory.")]

# -- the answer

Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table; all in bytes.")]

Svg = Annotated[
    Path | None, typer.Option(help="A folder for drawings by plugins, such as timelines.")
]

Against = Annotated[
    Path | None,
    typer.Option(help="Compare with a run: the folder of its section memory_snapshot."),
]
