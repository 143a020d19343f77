"""How the command talks: tables that fit the terminal or, in a pipe, are never cut; lists that fold;
JSON; one-line messages.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import typer

from ds_core.errors import DSError


class CommandError(DSError):
    """Something is wrong with how a command was called; `dscore` exits with 2."""


def check_folder(folder: str | os.PathLike[str], what: str = "folder") -> None:
    """Raises CommandError unless `folder` is a folder.

    what: what the message calls it.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise CommandError(f"{str(folder)!r} is a file; a {what} is needed")
    if not os.path.isdir(folder):
        raise CommandError(f"no such {what}: {str(folder)!r}{_where(folder)}")


def check_file(file: str | os.PathLike[str], what: str = "file") -> None:
    """Raises CommandError unless `file` is a file that can be read; for `what` see
    `check_folder`.
    """
    if os.path.isdir(file):
        raise CommandError(f"{str(file)!r} is a folder; a {what} is needed")
    if not os.path.exists(file):
        raise CommandError(f"no such {what}: {str(file)!r}{_where(file)}")
    if not os.access(file, os.R_OK):
        raise CommandError(f"the {what} {str(file)!r} cannot be read: permission denied")


def _where(path: str | os.PathLike[str]) -> str:
    return "" if os.path.isabs(path) else f" in {os.getcwd()!r}"


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


def show_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, fold: bool = False
) -> None:
    """A table on stdout.

    On a terminal long cells are folded; elsewhere every row is one whole line, unless `fold` is
    set.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    box_ = box.SIMPLE_HEAD if _is_terminal() else None
    folds = fold or _is_terminal()
    table = Table(box=box_, pad_edge=False, padding=(0, 1, 0, 1))
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=not folds)
    for row in rows:
        cells = (cell if folds else " ".join(cell.split()) for cell in row)
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in cells))
    _print(table, terminal_width() if folds else WHOLE)


def show_list(rows: Sequence[tuple[str, str, str]]) -> None:
    """Rows of (state, text, what stands below it or "") on stdout, folded between words to the
    terminal's width.
    """
    wide = max((len(state) for state, _, _ in rows), default=0) + 2
    room = max(terminal_width() - wide, 20)
    for state, text, below in rows:
        head = typer.style(state.ljust(wide), fg=_STYLES.get(state, "").split(" ")[-1] or None)
        for part in filter(None, (text, below)):
            # A path is never cut in two in a pipe: it may be another program's to read.
            lines = textwrap.wrap(
                " ".join(part.split()),
                room,
                break_on_hyphens=False,
                break_long_words=_is_terminal(),
            )
            for line in lines:
                typer.echo(head + line)
                head = " " * wide


WHOLE = 1 << 20
"""A width that no row reaches."""


def terminal_width() -> int:
    """The columns of the terminal; in a pipe 80, or what COLUMNS says."""
    columns = os.environ.get("COLUMNS", "")
    if not _is_terminal():
        return int(columns) if columns.isdecimal() and int(columns) else 80
    return shutil.get_terminal_size().columns


def _is_terminal() -> bool:
    return sys.stdout.isatty()


def _print(table: Any, width: int) -> None:
    """The table, without spaces at the ends of lines."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width, force_terminal=_is_terminal())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    for line in console.file.getvalue().splitlines():
        typer.echo(line.rstrip())


_STYLES = {
    "ok": "green",
    "loaded": "green",
    "note": "yellow",
    "disabled": "yellow",
    "--": "bright_black",
    "fault": "bold red",
    "quarantined": "bold red",
}
