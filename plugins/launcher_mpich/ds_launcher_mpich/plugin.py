"""The declaration of dscore-launcher-mpich (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import LauncherEntry


def ds_launchers() -> Mapping[str, LauncherEntry]:
    """The hosts of a hostfile, by the mpiexec of MPICH and of those that come from it."""
    makers = {"mpich": "MPICH", "impi": "Intel MPI", "mvapich": "MVAPICH"}
    return {
        name: LauncherEntry(
            f"ds_launcher_mpich.hydra:{name}", f"the hosts of --hostfile, by the mpiexec of {maker}"
        )
        for name, maker in makers.items()
    }
