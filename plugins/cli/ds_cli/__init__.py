"""The command ``dscore``.

Importing this costs nothing; `main` builds the command and only then loads typer.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process and exit with its status."""
    from ds_cli.app import make_app

    make_app()(prog_name="dscore")
