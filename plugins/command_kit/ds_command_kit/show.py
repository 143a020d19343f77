"""How the command talks: tables that fit the terminal or, in a pipe, are never cut; JSON; one-line
messages.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import typer

from ds_core.errors import DSError


class CommandError(DSError):
    """Something is wrong with how a command was called; `dscore` exits with 2."""


@contextmanager
def other_output_to_stderr() -> Iterator[None]:
    """While plugins are loaded: what they, or libraries in C, write to stdout must not stand in a
    command's output.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def say_error(text: str) -> None:
    """One plain message on stderr."""
    typer.echo(f"dscore: {text}", err=True)


def show_json(value: Any) -> None:
    """`value` as indented JSON on stdout."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout.

    On a terminal long cells are folded; elsewhere every row is one whole line.
    """
    if _is_terminal():
        _on_terminal(columns, rows)
        return
    flat = [[" ".join(cell.split()) for cell in row] for row in (columns, *rows)]
    widths = [max(len(row[i]) for row in flat) for i in range(len(columns))]
    for row in flat:
        typer.echo(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def show_list(rows: Sequence[tuple[str, str, str]]) -> None:
    """Rows of (state, text, what stands below it or "") on stdout, folded at a terminal's width; in
    a pipe never.
    """
    wide = max((len(state) for state, _, _ in rows), default=0) + 2
    width = shutil.get_terminal_size().columns if _is_terminal() else None
    for state, text, below in rows:
        for at, part in enumerate(filter(None, (text, below))):
            flat = " ".join(part.split())
            lines = (
                textwrap.wrap(flat, max(width - wide, 20), break_on_hyphens=False)
                if width
                else [flat]
            )
            for number, line in enumerate(lines):
                first = at == number == 0
                head = (
                    typer.style(state.ljust(wide), fg=_COLOURS.get(state)) if first else " " * wide
                )
                typer.echo(head + line)


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _on_terminal(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console().print(table)


_STYLES = {
    "ok": "green",
    "loaded": "green",
    "note": "yellow",
    "disabled": "yellow",
    "fault": "bold red",
    "quarantined": "bold red",
}
_COLOURS = {state: style.removeprefix("bold ") for state, style in _STYLES.items()}
