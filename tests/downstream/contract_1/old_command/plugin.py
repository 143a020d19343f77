"""The declaration of old-command: a command of ``dscore`` (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import CommandEntry


def ds_commands() -> Mapping[str, CommandEntry]:
    """A name such as "config old-command" adds to a group."""
    return {
        "old-command": CommandEntry(
            "old_command.command:owners",
            help="Say who owns the sections of a config.",
        )
    }
