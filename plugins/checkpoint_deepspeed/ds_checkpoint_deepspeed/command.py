"""``dscore import``: make a checkpoint out of other programs' files. torch is loaded when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from ds_cli.show import say_error

__all__ = ["import_checkpoint"]


def import_checkpoint(
    source: Annotated[Path, typer.Argument(help="DeepSpeed's checkpoint, safetensors, or a torch state dict.")],
    output: Annotated[Path, typer.Argument(help="Folder of checkpoints to write into; its `latest` will name it.")],
    tag: Annotated[str | None, typer.Option("--tag", help="The name to give it; default: as in SOURCE.")] = None,
) -> None:
    """Make a checkpoint out of other files; `engine.load_checkpoint` resumes it at any stage and world size."""
    from ds_checkpoint_deepspeed.importing import import_checkpoint as make

    path, missing = make(source, output, tag)
    typer.echo(str(path))
    for text in missing:
        say_error(text)
