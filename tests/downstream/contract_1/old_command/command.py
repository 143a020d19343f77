"""The command: its signature gives the options, by typer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ds_core.config import read_config
from ds_core.plugins import Plugins


def owners(
    file: Annotated[Path, typer.Argument(help="A config.")],
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of lines.")] = False,
) -> None:
    """One line a section. An error of `ds_core.errors` becomes one plain message."""
    plugins = Plugins()
    found = {name: plugins.section(name) for name in read_config(file).raw}
    named = {name: owner.dist if owner else "dscore-train, or nobody" for name, owner in found.items()}
    if as_json:
        typer.echo(json.dumps(named))
        return
    for name, owner in named.items():
        typer.echo(f"{name}: {owner}")
