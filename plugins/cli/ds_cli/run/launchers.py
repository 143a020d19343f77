"""Launchers by name, and whether what they are to start is there (torch-free)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from ds_command_kit.launch import Launcher, LaunchRequest
from ds_command_kit.show import CommandError

from ds_core.errors import PluginError, did_you_mean
from ds_core.plugins import Plugins

CONFIGS = (".json", ".hjson", ".yaml", ".yml", ".toml")
"""How names of config files end."""


def check_script(script: str, arguments: Sequence[str] = ()) -> None:
    """Raises CommandError unless `script` is a file that can be read, and no config.

    arguments: those after it, among which the script may be.
    """
    if os.path.isdir(script):
        raise CommandError(f"{script!r} is a directory, not a script; name the .py file in it")
    if not os.path.exists(script):
        where = "" if os.path.isabs(script) else f" in {os.getcwd()!r}"
        module = (
            "; to run a module use --module"
            if "/" not in script and not script.endswith(".py")
            else ""
        )
        raise CommandError(f"no such script: {script!r}{where}{module}")
    if not os.access(script, os.R_OK):
        raise CommandError(f"the script {script!r} cannot be read: permission denied")
    if script.endswith(CONFIGS):
        meant = next((word for word in arguments if word.endswith(".py")), "train.py")
        raise CommandError(
            f"{script!r} is a config, not a Python script; did you mean: dscore run {meant} "
            f"--deepspeed_config {script}"
        )


def check_program(name: str) -> None:
    """Raises CommandError unless `name` is a program that can be run."""
    if shutil.which(name) is None:
        where = " on the PATH" if os.sep not in name else ", or it cannot be executed"
        raise CommandError(f"--no-python: no such program: {name!r}{where}")


def find_launcher(name: str) -> Launcher:
    """The launcher that the core or a plugin offers as `name`.

    Raises CommandError with what is installed, or PluginError when the plugin that offers it is
    broken.
    """
    plugins = Plugins()
    offers = plugins.named("ds_launchers", "launcher")
    if name.lower() not in offers:
        fix = did_you_mean(name, offers)
        fix = f"; {fix}" if fix else "."
        names = ", ".join(sorted(offers))
        raise CommandError(
            f"no launcher is called {name!r}{fix} Installed: {names}{plugins.quarantined()}"
        )
    chosen = offers[name.lower()]
    function = chosen.resolve(
        chosen.value.load, f"launcher {name!r}, which it offers by ds_launchers"
    )
    if not callable(function):
        raise PluginError(
            f"launcher {name!r} of {chosen.plugin.dist}: {chosen.value.load} is not a function"
        )

    def launcher(request: LaunchRequest) -> int:
        code = function(request)
        if not isinstance(code, int):
            raise PluginError(
                f"launcher {name!r} of {chosen.plugin.dist} returned {code!r}; it must return the "
                "exit code"
            )
        return code

    return launcher
