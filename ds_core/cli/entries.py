"""The launcher that comes with the core (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import LauncherEntry

__all__ = ["LAUNCHERS"]

LAUNCHERS: Mapping[str, LauncherEntry] = {
    "local": LauncherEntry("ds_core.cli.local:launch", "processes on this machine, by torch's elastic launcher"),
}
