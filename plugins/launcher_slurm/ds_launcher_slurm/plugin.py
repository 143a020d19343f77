"""The declaration of dscore-launcher-slurm (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import LauncherEntry


def ds_launchers() -> Mapping[str, LauncherEntry]:
    """The nodes of an allocation, by srun."""
    return {
        "slurm": LauncherEntry(
            "ds_launcher_slurm.slurm:launch", "the nodes of a Slurm allocation, by srun"
        )
    }
