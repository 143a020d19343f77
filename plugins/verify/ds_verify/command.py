"""``dscore verify``: is a script's run right? (torch-free until records are compared)."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from ds_command_kit.show import CommandError

if TYPE_CHECKING:
    from ds_verify.comparing import Report

ScriptName = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="The training script, which needs no change.")
]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments.")
]
World = Annotated[
    int, typer.Option("--world", min=1, metavar="N", help="Processes of the run, on this host.")
]
Steps = Annotated[int, typer.Option(min=1, metavar="N", help="Optimizer steps that are compared.")]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="CONFIG", help="A config whose keys replace those of the script's config."
    ),
]
Against = Annotated[
    str,
    typer.Option(
        metavar="CONFIG", help='"one": one process; or a config file with keys of another layout.'
    ),
]
AgainstWorld = Annotated[
    int, typer.Option(min=1, metavar="N", help="Processes of the layout that --against names.")
]
AgainstArguments = Annotated[
    str,
    typer.Option(
        metavar="WORDS", help='Words that SCRIPT gets after its own in the reference: "--ep 1".'
    ),
]
Limit = Annotated[
    float,
    typer.Option(min=1, metavar="X", help="Ratio to rounding above which a tensor is different."),
]
Module = Annotated[
    bool, typer.Option("--module", "-m", help="SCRIPT is a module, as in `python -m`.")
]
Json = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write all ratios to this file.")
]
Html = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a page with a picture of the ratios to this file."),
]
Keep = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Keep the records in this folder, which must be new."),
]


def verify(
    script: ScriptName,
    arguments: Arguments = None,
    world: World = 2,
    steps: Steps = 3,
    config: Config = None,
    against: Against = "one",
    against_world: AgainstWorld = 1,
    against_arguments: AgainstArguments = "",
    limit: Limit = 8.0,
    module: Module = False,
    as_json: Json = None,
    html: Html = None,
    keep: Keep = None,
) -> None:
    """Say whether a script computes in its layout what one process computes.

    The script runs as it is on several processes, and its first steps are recorded. One process then
    computes the same micro-batches with the same weights, twice: once exactly, once with inputs that
    differ by one unit in the last place, which tells what rounding explains.

    Exit codes:
      0: all tensors are equal, but for rounding
      1: a tensor differs
      2: wrong usage, or the runs could not be made

    Examples:
      dscore verify train.py
      dscore verify --world 4 --steps 5 train.py --deepspeed_config ds_config.json
      dscore verify --against one_stage.json --html verify.html train.py
    """
    from ds_core.errors import DSError
    from ds_verify.report import describe
    from ds_verify.runs import Script, make_runs

    if against == "one" and against_world > 1:
        raise CommandError("--against-world needs --against FILE, the layout of these processes")
    words = Script(("--module",) if module else (), script, tuple(arguments or ()))
    with _folder(keep) as folder:
        try:
            folders = make_runs(
                words,
                world,
                folder,
                config=_keys(config),
                against=None if against == "one" else _keys(Path(against)),
                section={"steps": steps},
                reference_world=against_world,
                reference_arguments=shlex.split(against_arguments),
            )
            from ds_verify.comparing import compare_folders

            report = compare_folders(*folders, limit=limit)
        except DSError as error:
            # 1 means that a tensor differs, so nothing else may end with it.
            raise CommandError(str(error)) from error
    typer.echo(describe(report))
    _write(report, script, as_json, html)
    raise typer.Exit(0 if report.first is None else 1)


def _write(report: Report, script: str, as_json: Path | None, html: Path | None) -> None:
    if as_json is not None:
        from ds_verify.report import as_data

        as_json.write_text(json.dumps(as_data(report), indent=1), encoding="utf-8")
    if html is not None:
        from ds_verify.page import make_page

        html.write_text(make_page(report, script), encoding="utf-8")


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Where the records go: a temporary folder, unless they are to be kept."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="dscore-verify-") as folder:
            yield Path(folder)
        return
    if keep.exists():
        raise CommandError(f"--keep {keep}: it is there already; name a new folder")
    yield keep.absolute()


def _keys(config: Path | None) -> dict[str, Any]:
    from ds_core.config import read_config

    return read_config(config).raw if config is not None else {}


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings={"allow_interspersed_args": False})(verify)
