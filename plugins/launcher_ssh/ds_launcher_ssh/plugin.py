"""The declaration of dscore-launcher-ssh (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import LauncherEntry


def ds_launchers() -> Mapping[str, LauncherEntry]:
    """The hosts of a hostfile, by ssh."""
    return {
        "ssh": LauncherEntry(
            "ds_launcher_ssh.ssh:launch", "the hosts of --hostfile, each reached with OpenSSH"
        )
    }
