"""What ``-h`` and ``--help`` print: panels that fit the terminal, the same in a pipe.

The docstring of a command may end in two sections, each with indented lines::

    Exit codes:
      0: the checkpoint is as it was written
      1: a file differs

    Examples:
      dscore checkpoint verify runs/first

Options are grouped by typer's ``rich_help_panel``.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

from ds_command_kit.show import terminal_width

if TYPE_CHECKING:
    from rich.console import Console

EXIT_CODES = "Exit codes"
EXAMPLES = "Examples"
USUAL_CODES = ("0: done", "1: failed, and stderr says why", "2: wrong usage; nothing was done")
"""For a command whose docstring names none."""
WRONG_USAGE = "2: wrong usage; nothing was done"
NAME_COLUMNS = 30
"""The most columns that names of options take; longer lists of names are folded between names."""

_PLAIN = {
    "<int range>": "N",
    "<int>": "N",
    "<float range>": "X",
    "<float>": "X",
    "<str>": "TEXT",
    "<path>": "PATH",
    "INTEGER RANGE": "N",
    "INTEGER": "N",
    "FLOAT RANGE": "X",
    "FLOAT": "X",
}
"""What typer and click call values of an option without a metavar -> what the help calls them."""


class HelpContext(typer.Context):
    """The context of every command: typer asks it for the help."""

    def get_help(self) -> str:
        """The whole help, without a line that is wider than the terminal."""
        return render(self)


def with_help(command: Any) -> Any:
    """`command`, which shows its help in this form, and so do its sub-commands."""
    command.context_class = HelpContext
    for below in getattr(command, "commands", {}).values():
        with_help(below)
    return command


def render(ctx: Any) -> str:
    """The help of the command of `ctx`."""
    from rich.console import Console

    command = ctx.command
    # A command may have options that it learns of only now, those of other packages.
    getattr(command, "prepare_help", lambda: None)()
    about, sections = split(command.help or "")
    console = Console(
        file=io.StringIO(),
        width=terminal_width(),
        force_terminal=sys.stdout.isatty(),
        highlight=False,
        emoji=False,
    )
    console.print(f"Usage: {ctx.command_path} {_usage(ctx)}", markup=False, style="bold")
    for paragraph in about:
        console.print()
        console.print(paragraph, markup=False)
    for title, rows in _panels(ctx).items():
        _print_panel(console, title, rows)
    codes = sections.get(EXIT_CODES) or ([] if _commands(ctx) else USUAL_CODES)
    if codes:
        _print_lines(console, EXIT_CODES, _with_usage(codes))
    if EXAMPLES in sections:
        _print_lines(console, EXAMPLES, sections[EXAMPLES], soft=True)
    assert isinstance(console.file, io.StringIO)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def split(text: str) -> tuple[list[str], dict[str, list[str]]]:
    """A docstring's paragraphs, each as one line, and its two sections with their lines."""
    paragraphs: list[str] = []
    sections: dict[str, list[str]] = {}
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        first, *lines = block.strip("\n").splitlines() or [""]
        title = first.strip().removesuffix(":")
        if first.strip().endswith(":") and title in (EXIT_CODES, EXAMPLES):
            sections[title] = inspect.cleandoc("\n" + "\n".join(lines)).splitlines()
        elif flat := " ".join(block.split()):
            paragraphs.append(flat)
    return paragraphs, sections


def summary(text: str) -> str:
    """The first paragraph of a docstring, for a list of commands."""
    return next(iter(split(text)[0]), "")


def _with_usage(codes: Iterable[str]) -> list[str]:
    """Wrong usage ends with 2 in every command."""
    rows = list(codes)
    return rows if any(row.startswith("2") for row in rows) else [*rows, WRONG_USAGE]


def _usage(ctx: Any) -> str:
    """The words after the command's name."""
    arguments = [p for p in ctx.command.params if p.param_type_name == "argument"]
    words = ["[OPTIONS]", *map(_argument, arguments)]
    return " ".join([*words, "COMMAND [ARGS]..."] if _commands(ctx) else words)


def _argument(param: Any) -> str:
    """``SCRIPT``, ``[FOLDER]`` or ``[ARGS]...``."""
    name = param.metavar or str(param.name).upper()
    many = "..." if param.nargs != 1 and not name.endswith("...") else ""
    return f"{name}{many}" if param.required or name.startswith("[") else f"[{name}]{many}"


def _panels(ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Title -> (name, text); arguments and commands come first, plain options and --help last."""
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": []}
    if commands := _commands(ctx):
        panels["Commands"] = commands
    plain: list[tuple[str, str]] = []
    for param in ctx.command.get_params(ctx):
        record = None if getattr(param, "hidden", False) else param.get_help_record(ctx)
        if record is None:
            continue
        argument = param.param_type_name == "argument"
        # What the line of usage says needs no word.
        text = record[1].replace("  [required]", "") if argument else record[1]
        row = (_argument(param) if argument else _plain(record[0]), text)
        panel = getattr(param, "rich_help_panel", None)
        if panel:
            panels.setdefault(panel, []).append(row)
        elif argument:
            panels["Arguments"].append(row)
        else:
            plain.append(row)
    return {title: rows for title, rows in {**panels, "Options": plain}.items() if rows}


def _commands(ctx: Any) -> list[tuple[str, str]]:
    """The commands of a group, each with its line; none for a command."""
    group = ctx.command
    if not hasattr(group, "list_commands"):
        return []
    found = ((name, group.get_command(ctx, name)) for name in group.list_commands(ctx))
    return [(name, summary(one.short_help or one.help or "")) for name, one in found if one]


def _plain(name: str) -> str:
    for before, after in _PLAIN.items():
        name = name.replace(before, after)
    return re.sub(r"<([\w|.-]+)>", r"\1", name)


def _print_panel(console: Console, title: str, rows: list[tuple[str, str]]) -> None:
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    _print_title(console, title)
    table = Table.grid(padding=(0, 2, 0, 0))
    widest = max(len(name) for name, _ in rows)
    column = min(widest, max(NAME_COLUMNS, *(len(w) for name, _ in rows for w in name.split())))
    table.add_column(width=column, overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    for name, text in rows:
        table.add_row(Text(name, style="cyan"), Text(" ".join(text.split())))
    console.print(Padding(table, (0, 0, 0, 2)))


def _print_lines(console: Console, title: str, lines: Iterable[str], *, soft: bool = False) -> None:
    from rich.padding import Padding
    from rich.text import Text

    _print_title(console, title)
    for line in lines:
        if soft:
            console.print(f"  {line}", markup=False, soft_wrap=True)
        else:
            console.print(Padding(Text(line), (0, 0, 0, 2)))


def _print_title(console: Console, title: str) -> None:
    console.print()
    console.print(f"{title}:", style="bold", markup=False)
