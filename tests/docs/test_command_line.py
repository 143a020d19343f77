"""The page of the command line has the exit codes that each command's help names.

``python tests/docs/test_command_line.py`` writes its table anew.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "command-line.md"
TABLE = re.compile(r"<!-- exit codes -->\n.*?<!-- /exit codes -->", re.DOTALL)


def commands(ctx: Any, group: Any) -> Iterator[tuple[str, Any]]:
    """Every command below `group`, with its whole name."""
    for name in group.list_commands(ctx):
        _, command, _ = group.resolve_command(ctx, [name])
        below = typer.Context(command, info_name=name, parent=ctx)
        if hasattr(command, "list_commands"):
            yield from commands(below, command)
        else:
            yield below.command_path, command


def table() -> str:
    """A row for each command: what its 0, 1 and 2 say."""
    from ds_cli.plugin import ds_commands
    from ds_command_kit.app import make_app
    from ds_command_kit.help import EXIT_CODES, split

    root: Any = typer.main.get_command(make_app(ds_commands()))
    rows = ["| command | 0 | 1 | 2, besides wrong usage |", "| --- | --- | --- | --- |"]
    for name, command in sorted(commands(typer.Context(root, info_name="dscore"), root)):
        said = dict(
            line.split(": ", 1)
            for line in split(command.help or "")[1].get(EXIT_CODES, ())
            if line[:1] in "012"
        )
        two = said.get("2", "").removeprefix("wrong usage").strip("; ,")
        two = two.removeprefix("or ").removeprefix("such as ").removeprefix("nothing was started")
        cells = [said["0"], said.get("1", ""), two]
        rows.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(["<!-- exit codes -->", *rows, "<!-- /exit codes -->"])


def test_the_table_of_exit_codes_is_that_of_the_commands() -> None:
    found = TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    assert found[0] == table(), "python tests/docs/test_command_line.py writes it anew"
    assert len(found[0].splitlines()) > 25


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8")), "utf-8")
    sys.exit(0)
