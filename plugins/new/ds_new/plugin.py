"""The declaration of dscore-new: ``dscore new`` (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import CommandEntry


def ds_commands() -> Mapping[str, CommandEntry]:
    """One group, which other packages may add to."""
    return {
        "new": CommandEntry(
            "ds_new.command:app", "Write a new plugin, with its tests, README and CI file."
        )
    }
