"""The declaration of dscore-launcher-ray (torch-free, and without ray)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import LauncherEntry


def ds_launchers() -> Mapping[str, LauncherEntry]:
    """The nodes of a Ray cluster."""
    return {
        "ray": LauncherEntry(
            "ds_launcher_ray.launcher:launch", "nodes of a running Ray cluster, one agent on each"
        )
    }
