"""``dscore checkpoint import`` and ``export-deepspeed``: make a checkpoint out of other programs'
files, and files for DeepSpeed out of a checkpoint. torch is loaded when one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from ds_command_kit.show import say_error


def import_checkpoint(
    source: Annotated[
        Path, typer.Argument(help="DeepSpeed's checkpoint, safetensors, or a torch state dict.")
    ],
    output: Annotated[
        Path, typer.Argument(help="Folder of checkpoints to write into; its `latest` will name it.")
    ],
    tag: Annotated[
        str | None, typer.Option("--tag", help="The name to give it; default: as in SOURCE.")
    ] = None,
) -> None:
    """Make a checkpoint out of other files; `engine.load_checkpoint` resumes it at any stage and
    world size.
    """
    from ds_checkpoint_deepspeed.importing import import_checkpoint as make

    path, missing = make(source, output, tag)
    typer.echo(str(path))
    for text in missing:
        say_error(text)


def export_deepspeed(
    folder: Annotated[
        Path,
        typer.Argument(help="A checkpoint, or the folder above it (then its `latest` counts)."),
    ],
    output: Annotated[
        Path, typer.Argument(help="Folder to write it below, under its tag; `latest` will name it.")
    ],
    tag: Annotated[str | None, typer.Option("--tag", help="The checkpoint below FOLDER.")] = None,
    stage: Annotated[int, typer.Option(min=0, max=3, help="The ZeRO stage that will load it.")] = 2,
    ranks: Annotated[
        int, typer.Option(min=1, help="The number of data-parallel ranks that will load it.")
    ] = 1,
    universal: Annotated[
        bool,
        typer.Option(
            "--universal",
            help="A universal checkpoint, OUTPUT itself: for stages 1 to 3, any ranks.",
        ),
    ] = False,
) -> None:
    """Write a checkpoint in DeepSpeed's form, for its engine, zero_to_fp32 and ds_to_universal."""
    from ds_checkpoint_deepspeed.exporting import export_deepspeed as export
    from ds_checkpoint_deepspeed.exporting import export_universal

    if universal:
        typer.echo(str(export_universal(folder, output, tag=tag)))
    else:
        typer.echo(str(export(folder, output, tag=tag, stage=stage, world_size=ranks)))
