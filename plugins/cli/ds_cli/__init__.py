"""The command ``dscore``.

Importing this costs nothing; `main` builds the command and only then loads typer.
"""

from __future__ import annotations

import ds_core  # noqa: F401  the old names of modules below this one are found by it


def main() -> None:
    """Run the command line of this process and exit with its status."""
    from ds_command_kit.app import make_app

    from ds_cli.plugin import ds_commands

    make_app(ds_commands())(prog_name="dscore")
