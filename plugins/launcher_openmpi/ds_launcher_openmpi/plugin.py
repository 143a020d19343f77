"""The declaration of dscore-launcher-openmpi (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import LauncherEntry


def ds_launchers() -> Mapping[str, LauncherEntry]:
    """The hosts of a hostfile, by mpirun."""
    offer = LauncherEntry(
        "ds_launcher_openmpi.openmpi:launch", "the hosts of --hostfile, by Open MPI's mpirun"
    )
    return {"openmpi": offer}
