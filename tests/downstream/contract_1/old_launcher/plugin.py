"""The declaration of old-launcher: a launcher (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import LauncherEntry


def ds_launchers() -> Mapping[str, LauncherEntry]:
    """Chosen by ``dscore run --launcher NAME``."""
    return {
        "old_launcher": LauncherEntry(
            "old_launcher.launcher:start",
            help="containers, by docker exec",
        )
    }
