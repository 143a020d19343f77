"""The declaration of dscore-cli: its commands and the local launcher (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping

from ds_core.entries import CommandEntry, LauncherEntry


def ds_commands() -> Mapping[str, CommandEntry]:
    """What a run needs before it starts: to start it, to check its config, to see what is
    installed.
    """
    return {
        "run": CommandEntry(
            "ds_cli.run.command:app",
            "Run a script in several processes, here or on several hosts.",
        ),
        "plugins": CommandEntry(
            "ds_cli.plugins.command:app",
            "Show every installed plugin: the names that it offers, its state and why.",
        ),
        "doctor": CommandEntry(
            "ds_cli.doctor.command:doctor", "Examine this machine and the installation."
        ),
        "explain": CommandEntry(
            "ds_cli.explain.command:explain", "Say what an error message means and what to do."
        ),
        "config": CommandEntry("ds_cli.config.command:app", "Check and explain configs."),
    }


def ds_launchers() -> Mapping[str, LauncherEntry]:
    """Processes on this machine."""
    return {
        "local": LauncherEntry(
            "ds_cli.local.launcher:launch", "processes on this machine, by torch's elastic launcher"
        )
    }
