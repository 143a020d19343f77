"""From the words of ``dscore run`` to a `LaunchRequest`, and from a launcher's name to its function
(torch-free).
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field

from ds_cli.hosts.hostfile import Host
from ds_cli.show import CommandError
from ds_core.errors import PluginError, nearest
from ds_core.plugins import Plugins


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What ``dscore run`` was asked for; a launcher takes it and returns the exit code."""

    script: str
    """The path of a file, or the name of a module when `is_module`, or a program when `is_command`.
    """
    arguments: tuple[str, ...] = ()
    """The script's own, untouched."""
    is_module: bool = False
    nproc: int | None = None
    """Processes per machine; None: one per accelerator, or 1 where there is none."""
    slots: tuple[int, ...] | None = None
    """The numbers of the accelerators to use here; None: all."""
    max_restarts: int = 0
    """How often all processes are started again after one fails."""
    hosts: tuple[Host, ...] = ()
    """The machines to start on, of which the first has number 0; empty: this one, or those that the
    launcher finds.
    """
    min_nodes: int = 1
    max_nodes: int = 1
    """How many machines; 0 lets the launcher decide, and the two are equal where the run is not
    elastic.
    """
    node_rank: int | None = None
    """The number of this machine; None lets the rendezvous decide."""
    rdzv_endpoint: str = ""
    """``host[:port]`` where machines meet; "": none."""
    rdzv_id: str = "dscore"
    """Names the run among several that meet there."""
    master_addr: str = ""
    """Of rank 0's store; "" lets the launcher choose."""
    master_port: int | None = None
    """The same; None lets the launcher choose."""
    tag: bool = False
    """Put the rank before every line of output."""
    grace: float = 5.0
    """Seconds that processes get to end by themselves."""
    notice: float = 30.0
    """The same after SIGTERM, for those that save something."""
    local_rank: bool = False
    """Pass ``--local_rank=i`` as the script's first argument."""
    is_command: bool = False
    """`script` is a program that is run as it is."""
    log_folder: str = ""
    """Each rank's output goes to a file there; "": to this process's output."""
    bind: bool = False
    """Tie each process to its share of the cores."""
    cores: tuple[int, ...] = ()
    """The cores to share; empty: all."""
    venv_script: str = ""
    """Is sourced first; "": nothing is."""
    save_pid: bool = False
    """Leave this process's id in a file while it runs."""
    level: int = logging.WARNING
    """Of `logging`: what the launcher itself says."""
    launcher_args: tuple[str, ...] = ()
    """For the program that reaches the hosts, after its own options."""
    ssh_port: int | None = None
    """None: ssh's own choice."""
    exported: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)
    """Variables for every host; their values may be secrets."""
    show: bool = False
    """Print what would be run, and run nothing."""


Launcher = Callable[[LaunchRequest], int]


def parse_nproc(text: str) -> int | None:
    """``"auto"`` -> None, ``"4"`` -> 4. Raises CommandError for anything else."""
    if text in ("auto", "-1"):  # -1 is the documents' word for all
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise CommandError(
            f"--nproc {text!r} must be a whole number > 0 or 'auto' (one per accelerator)"
        )
    return int(text)


def parse_nodes(text: str) -> tuple[int, int]:
    """``"2"`` -> (2, 2), ``"1:4"`` -> (1, 4), "" -> (0, 0): not told.

    Raises CommandError for anything else.
    """
    if text in ("", "-1"):  # -1 is the documents' word for all
        return 0, 0
    match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise CommandError(
            f"--nnodes {text!r} must be a number of machines > 0, or MIN:MAX as in 1:4"
        )
    return low, high


def check_script(script: str) -> None:
    """Raises CommandError unless `script` is a file that can be read."""
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
        hint = nearest(name, offers)
        fix = f"; did you mean {hint!r}?" if hint else ""
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
