"""``dscore report``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from ds_command_kit.show import CommandError


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Folders of runs: of run_record, csv_monitor or TensorBoard."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="The file; report.html in the run's folder, or here for several runs.",
        ),
    ] = None,
    title: Annotated[str, typer.Option(metavar="TEXT", help="Title of the page.")] = "",
) -> None:
    """Write one HTML page that shows one or several runs side by side; it needs no network and no
    other file.

    Exit codes:
      0: the page is written

    Examples:
      dscore report runs/first
      dscore report runs/first runs/second -o compared.html --title "two stages"
    """
    from ds_report.page.page import page
    from ds_report.run import find_runs, names_of, read_run

    folders = find_runs(runs)
    found = [
        read_run(folder, name) for folder, name in zip(folders, names_of(folders), strict=True)
    ]
    path = output or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        new.write_text(page(found, title), encoding="utf-8", errors="backslashreplace")
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise CommandError(f"cannot write {str(path)!r}: {error.strerror}") from error
    typer.echo(f"{path}: {', '.join(run.name for run in found)}")
