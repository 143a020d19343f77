"""``dscore checkpoint``: inspect, verify, compare, convert, export and prune checkpoints. torch is
loaded when one is read.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from ds_command_kit.app import OpenGroup
from ds_command_kit.show import CommandError, check_folder, say_error, show_json, show_table

if TYPE_CHECKING:
    from ds_checkpoint.offline import Saved

Folder = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER",
        help="A checkpoint, or the folder above it (then its `latest` counts); or a URL.",
    ),
]
Tag = Annotated[
    str | None, typer.Option("--tag", metavar="NAME", help="The checkpoint below FOLDER.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]


app = typer.Typer(
    cls=OpenGroup,
    help="Inspect, verify, compare, convert, export and prune checkpoints.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
def inspect(folder: Folder, tag: Tag = None, as_json: Json = False) -> None:
    """Show what a checkpoint holds: where it comes from, its files, and every state.

    Exit codes:
      0: the checkpoint was read
      1: it cannot be read, and stderr says why

    Examples:
      dscore checkpoint inspect runs/first
      dscore checkpoint inspect runs/first --tag step100 --json
    """
    from ds_checkpoint.offline import open_saved

    _check_folder(folder)
    with open_saved(folder, tag) as saved:
        summary = _summary(saved)
    if as_json:
        show_json(summary)
        return
    for key in (
        "path",
        "step",
        "world_size",
        "mesh",
        "optimizer",
        "versions",
        "parameters",
        "bytes",
    ):
        typer.echo(f"{key + ':':<12}{summary[key]}")
    typer.echo()
    rows = [
        [s["name"], str(tuple(s["shape"])), s["dtype"], str(s["chunks"]), _at(s["at"])]
        for s in summary["states"]
    ]
    show_table(("state", "shape", "dtype", "chunks", "at"), rows)


def _summary(saved: Saved) -> dict[str, Any]:
    manifest = saved.manifest
    return {
        "path": str(saved.path),
        "step": manifest.step,
        "world_size": manifest.world_size,
        "mesh": manifest.mesh,
        "optimizer": manifest.optimizer,
        "versions": manifest.versions,
        "plugins": manifest.plugins,
        "parameters": sum(s.numel for s in manifest.states if s.name.startswith("module/")),
        "bytes": sum(mark.size for mark in manifest.files.values()),
        "files": {name: mark.size for name, mark in manifest.files.items()},
        "config": manifest.config,
        "states": [
            {
                "name": s.name,
                "shape": list(s.shape),
                "dtype": s.dtype,
                "chunks": len(s.chunks),
                "at": s.at,
            }
            for s in manifest.states
        ],
    }


def _at(place: dict[str, int]) -> str:
    return ", ".join(f"{axis} {index}" for axis, index in place.items())


@app.command()
def verify(folder: Folder, tag: Tag = None) -> None:
    """Compare every file with its checksum, and name the first that is not as it was written.

    Exit codes:
      0: every file is as it was written
      1: a file is not, or the checkpoint cannot be read

    Examples:
      dscore checkpoint verify runs/first
      dscore checkpoint verify runs/first --tag step100
    """
    from ds_checkpoint.offline import open_saved

    _check_folder(folder)
    with open_saved(folder, tag) as saved:
        saved.source.verify(0, 1)
        count = len(saved.manifest.files)
        size = sum(mark.size for mark in saved.manifest.files.values())
        plain = any(mark.checksum is None for mark in saved.manifest.files.values())
    note = (
        " (written by an old version, without checksums: only sizes and headers were compared)"
        if plain
        else ""
    )
    typer.echo(f"{saved.path}: ok, {count} files, {size} bytes{note}")


@app.command()
def export(
    folder: Folder,
    output: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            help="Folder to write model.safetensors (or several and an index) into.",
        ),
    ],
    tag: Tag = None,
    dtype: Annotated[
        str,
        typer.Option(metavar="DTYPE", help="fp32, bf16, fp16, or saved: as the model had it."),
    ] = "fp32",
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Most bytes per file, such as 5GB.")
    ] = "5GB",
    exclude_frozen: Annotated[
        bool, typer.Option("--exclude-frozen", help="Leave out what was not trained.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the weights that are in OUTPUT.")
    ] = False,
) -> None:
    """Write the whole model's weights as safetensors, in Hugging Face's layout.

    One weight at a time is in memory.

    Exit codes:
      0: the weights are written
      1: the checkpoint cannot be read, or OUTPUT cannot be written

    Examples:
      dscore checkpoint export runs/first weights
      dscore checkpoint export runs/first weights --dtype bf16 --overwrite
    """
    from ds_checkpoint.offline import check_output, export_weights, open_saved

    _check_folder(folder)
    with open_saved(folder, tag) as saved:
        check_output(output, overwrite)
        saved.source.verify(0, 1)
        paths = export_weights(
            saved,
            output,
            dtype=dtype,
            max_shard_size=max_shard_size,
            exclude_frozen_parameters=exclude_frozen,
            overwrite=overwrite,
        )
    for path in paths:
        typer.echo(str(path))


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A checkpoint of any known format, or a folder above it; or a URL.",
        ),
    ],
    output: Annotated[
        str,
        typer.Argument(
            metavar="OUTPUT",
            help="Folder to write into, where nothing is replaced; or a URL.",
        ),
    ],
    to: Annotated[
        str,
        typer.Option("--to", metavar="FORMAT", help="dscore, or a format that a package brings."),
    ] = "dscore",
    given: Annotated[
        str | None,
        typer.Option("--from", metavar="FORMAT", help="The format of SOURCE; default: seen in it."),
    ] = None,
    tag: Annotated[
        str | None, typer.Option("--tag", metavar="NAME", help="The checkpoint below SOURCE.")
    ] = None,
    model_config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="PATH",
            help="A config.json, or a folder with one, to go beside safetensors.",
        ),
    ] = None,
) -> None:
    """Write a checkpoint in another program's format, or make one of ours out of it.

    One tensor at a time is in memory.

    Exit codes:
      0: the checkpoint is written; stderr says what could not be taken over
      1: SOURCE cannot be read, or OUTPUT cannot be written
      2: FORMAT is not known

    Examples:
      dscore checkpoint convert runs/first fsdp --to dcp
      dscore checkpoint convert titan/step-1000 runs/first
      dscore checkpoint convert runs/first hf --to safetensors --config gpt2
    """
    from ds_checkpoint.formats.convert import convert as make
    from ds_checkpoint.storages.finding import is_url

    for path in (source, model_config):
        if path is not None and not is_url(path) and not Path(path).exists():
            raise CommandError(f"no such file or folder: {str(path)!r}")
    written = make(source, output, to, tag=tag, given=given, model_config=model_config)
    typer.echo(str(written.path))
    for text in written.missing:
        say_error(text)


@app.command()
def diff(
    first: Annotated[
        str, typer.Argument(metavar="FIRST", help="A checkpoint, or the folder above it.")
    ],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="Another one.")],
    as_json: Json = False,
) -> None:
    """Show which states differ, and by how much.

    Exit codes:
      0: all states are equal
      1: a state differs, or a checkpoint cannot be read

    Examples:
      dscore checkpoint diff runs/first/step100 runs/first/step200
      dscore checkpoint diff runs/first runs/second --json
    """
    from ds_checkpoint.offline import differences, open_saved

    _check_folder(first)
    _check_folder(second)
    with open_saved(first) as one, open_saved(second) as two:
        found = list(differences(one, two))
    if as_json:
        rows = [
            {"name": d.name, "kind": d.kind, "detail": d.detail, "largest": _finite(d.largest)}
            for d in found
        ]
        show_json(rows)
    elif found:
        largest = [["" if d.largest is None else f"{d.largest:.3g}"] for d in found]
        rows_ = [
            [d.name, d.kind, d.detail, *shown] for d, shown in zip(found, largest, strict=True)
        ]
        show_table(("state", "differs in", "how", "by at most"), rows_)
    else:
        typer.echo("all states are equal")
    if found:
        raise typer.Exit(1)


def _finite(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


@app.command()
def prune(
    folder: Annotated[
        str, typer.Argument(metavar="FOLDER", help="The folder above the checkpoints, or a URL.")
    ],
    keep: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="How many of the newest to keep, in addition to the latest."
        ),
    ],
) -> None:
    """Remove old checkpoints; never the one that `latest` names, and nothing that is not a
    checkpoint.

    Exit codes:
      0: at most --keep checkpoints and the latest are left
      1: FOLDER holds no checkpoint, or one cannot be removed

    Examples:
      dscore checkpoint prune runs/first --keep 3
    """
    from ds_checkpoint.storages.finding import open_storage
    from ds_core.errors import CheckpointError

    _check_folder(folder)
    storage = open_storage(folder, "FOLDER")
    tags = storage.tags()
    if not tags:
        raise CheckpointError(f"{storage.path()} holds no checkpoint")
    for tag in storage.prune(keep, tags[0]):
        typer.echo(f"removed {storage.path(tag)}")


def _check_folder(folder: str) -> None:
    """CommandError unless a path is a folder. What a URL names is known when it is read."""
    from ds_checkpoint.storages.finding import is_url

    if not is_url(folder):
        check_folder(folder)
