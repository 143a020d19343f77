"""``dscore checkpoint import`` and ``export-deepspeed``: make a checkpoint out of other programs'
files, and files for DeepSpeed out of a checkpoint. torch is loaded when one runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from ds_command_kit.show import CommandError, check_folder, say_error


def import_checkpoint(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="DeepSpeed's checkpoint, safetensors, or a torch state dict."
        ),
    ],
    output: Annotated[
        str,
        typer.Argument(
            metavar="OUTPUT",
            help="Folder of checkpoints to write into, or a URL; its `latest` will name it.",
        ),
    ],
    tag: Annotated[
        str | None,
        typer.Option("--tag", metavar="NAME", help="The name to give it; default: as in SOURCE."),
    ] = None,
) -> None:
    """Make a checkpoint out of other files; `engine.load_checkpoint` resumes it at any stage and
    world size.

    Exit codes:
      0: the checkpoint is written; stderr says what SOURCE does not have
      1: SOURCE cannot be read, or OUTPUT cannot be written

    Examples:
      dscore checkpoint import deepspeed_run/global_step500 runs/first
      dscore checkpoint import model.safetensors runs/first --tag start
    """
    from ds_checkpoint_deepspeed.importing import import_checkpoint as make

    if not source.exists():
        raise CommandError(f"no such file or folder: {str(source)!r} in {os.getcwd()!r}")
    path, missing = make(source, output, tag)
    typer.echo(str(path))
    for text in missing:
        say_error(text)


def export_deepspeed(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="A checkpoint, or the folder above it (then its `latest` counts).",
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            help="Folder to write it below, under its tag; `latest` will name it.",
        ),
    ],
    tag: Annotated[
        str | None, typer.Option("--tag", metavar="NAME", help="The checkpoint below FOLDER.")
    ] = None,
    stage: Annotated[
        int, typer.Option(min=0, max=3, metavar="N", help="The ZeRO stage that will load it.")
    ] = 2,
    world: Annotated[
        int,
        typer.Option(
            "--world",
            "--ranks",
            min=1,
            metavar="N",
            help="The number of data-parallel processes that will load it.",
        ),
    ] = 1,
    universal: Annotated[
        bool,
        typer.Option(
            "--universal",
            help="A universal checkpoint, OUTPUT itself: for stages 1 to 3, any ranks.",
        ),
    ] = False,
) -> None:
    """Write a checkpoint in DeepSpeed's form, for its engine, zero_to_fp32 and ds_to_universal.

    Exit codes:
      0: the checkpoint is written
      1: FOLDER cannot be read, or OUTPUT cannot be written

    Examples:
      dscore checkpoint export-deepspeed runs/first out --stage 3 --world 8
      dscore checkpoint export-deepspeed runs/first out --universal
    """
    from ds_checkpoint_deepspeed.exporting import export_deepspeed as export
    from ds_checkpoint_deepspeed.exporting import export_universal

    check_folder(folder)
    if universal:
        typer.echo(str(export_universal(folder, output, tag=tag)))
    else:
        typer.echo(str(export(folder, output, tag=tag, stage=stage, world_size=world)))
