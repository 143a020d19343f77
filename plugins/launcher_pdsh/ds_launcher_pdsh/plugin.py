"""The declaration of dscore-launcher-pdsh (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import LauncherEntry


def ds_launchers() -> Mapping[str, LauncherEntry]:
    """The hosts of a hostfile, by pdsh."""
    return {
        "pdsh": LauncherEntry(
            "ds_launcher_pdsh.pdsh:launch", "the hosts of --hostfile, reached with pdsh and ssh"
        )
    }
