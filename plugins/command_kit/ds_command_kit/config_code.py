"""A config is code: ``plugins.load`` names modules, and to import a module is to run it.

A run of the config imports them. A command that only looks at a file must not, unless it is asked
to: the file may be another's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ds_command_kit.show import CommandError, check_file

if TYPE_CHECKING:
    from ds_core.config.source import ConfigSource

Imports = Annotated[
    bool,
    typer.Option(
        "--import",
        help="Import the modules that plugins.load of the config names, which runs them.",
    ),
]
"""The option of commands that look at a config."""


def named_code(source: ConfigSource) -> tuple[str, ...]:
    """The modules that ``plugins.load`` names; none where that key is wrong."""
    from ds_core.config.build import plugin_settings

    return tuple(plugin_settings(source).load)


def read_to_look_at(file: Path, imports: bool) -> ConfigSource:
    """The config in `file`. ConfigError where values are wrong, CommandError where there is no such
    file, or it names code and `imports` is not set.
    """
    from ds_core.config.source import read_config

    return read_config(look_at(file, imports))


def look_at(file: Path, imports: bool) -> ConfigSource:
    """The same, with the problems of single values in the source."""
    from ds_core.config.source import read_config

    check_file(file, "config file")
    source = read_config(file, in_part=True)
    if (modules := named_code(source)) and not imports:
        raise CommandError(
            f"{file}: plugins.load names {', '.join(modules)}, and to check the config is to "
            "import that code: "
            "look at it first, then give --import"
        )
    return source
