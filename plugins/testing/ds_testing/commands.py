"""What dscore-testing offers to ds_core: ``dscore plugins grade`` (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import CommandEntry


def ds_commands() -> Mapping[str, CommandEntry]:
    """A command of the group ``plugins``."""
    return {
        "plugins grade": CommandEntry(
            "ds_testing.grade:grade",
            "Say how much of what users expect a plugin keeps: twenty rules in four levels.",
        )
    }
