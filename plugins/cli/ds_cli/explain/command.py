"""The command ``dscore explain`` (torch-free)."""

from __future__ import annotations

import sys
from importlib.metadata import metadata
from typing import TYPE_CHECKING, Annotated

import typer
from ds_command_kit.show import CommandError, say_error

if TYPE_CHECKING:
    from ds_cli.explain.search import Entry


def explain(
    text: Annotated[
        str,
        typer.Argument(
            metavar="TEXT", help="An error message or a whole traceback; - reads it from stdin."
        ),
    ],
) -> None:
    """Say what an error message means and what to do about it.

    Of a traceback the last message counts. Nothing is sent anywhere.

    Exit codes:
      0: the message is known, or known ones are near
      1: no known message is near

    Examples:
      dscore explain "train_batch_size 8 is not 2 x 1 x 3"
      dscore run train.py 2>&1 | tail -5 | dscore explain -
    """
    from ds_cli.explain.search import LONGEST, load, search

    if text == "-":
        text = sys.stdin.buffer.read()[-4 * LONGEST :].decode("utf-8", "replace")
    if not text.strip():
        raise CommandError("which message? Give its text in quotes, or - to read it from stdin")
    data = load()
    found = search(text, data)
    classes = data["classes"]
    if found.entries and not found.exact:
        typer.echo("no message is exactly this; the nearest:")
    for entry in found.entries[: 1 if found.exact else None]:
        _show(entry, classes)
    if not found.entries and found.error:
        _show_class(found.error, classes)
    elif not found.entries:
        say_error(
            "no message of ds_core or its packages is like this. If it is torch's or your own, "
            f"read its traceback; all messages: {_page('errors')}; by symptom: "
            f"{_page('troubleshooting')}"
        )
        raise typer.Exit(1)


def _page(name: str) -> str:
    """The address of a page of the documentation, which packages do not contain."""
    urls = dict(line.split(", ", 1) for line in metadata("dscore-cli").get_all("Project-URL") or ())
    return f"{urls.get('Documentation', 'docs')}/{name}.md"


def _show(entry: Entry, classes: dict[str, str]) -> None:
    typer.echo(f"{entry.error}: {entry.message}")
    if entry.meaning:
        typer.echo(f"  {entry.meaning}")
    elif classes.get(entry.error):
        typer.echo(f"  {classes[entry.error]}")
    if entry.module:
        typer.echo(f"  raised in: {entry.module}")
    typer.echo(f"  page: {_page('errors')}#{entry.error.lower()}")


def _show_class(error: str, classes: dict[str, str]) -> None:
    typer.echo(error)
    typer.echo(f"  {classes[error]}")
    typer.echo(f"  page: {_page('errors')}#{error.lower()}")
