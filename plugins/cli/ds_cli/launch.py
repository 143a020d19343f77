"""From the words of ``dscore run`` to a `LaunchRequest`, and from a launcher's name to its function (torch-free)."""

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

__all__ = ["Launcher", "LaunchRequest", "check_program", "check_script", "find_launcher", "parse_nodes", "parse_nproc"]


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What ``dscore run`` was asked for; a launcher takes it and returns the exit code.

    script: path of a file, or the name of a module when `is_module`. arguments: the script's own, untouched.
    nproc: processes per machine; None means one per accelerator, or 1 where there is none.
    slots: the numbers of the accelerators to use here; None means all. max_restarts: how often all processes are
    started again after one fails.
    hosts: the machines to start on, of which the first has number 0; empty: this one, or those that the launcher
    finds. min_nodes, max_nodes: how many; 0 lets the launcher decide. node_rank: of this machine; None lets the
    rendezvous decide.
    rdzv_endpoint: ``host[:port]`` where machines meet, "" for none. rdzv_id: names the run among several that
    meet there. master_addr, master_port: of rank 0's store; "" and None let the launcher choose.
    tag: put the rank before every line of output. grace: seconds that processes get to end by themselves. notice: the
    same after SIGTERM, for those that save something.
    local_rank: pass ``--local_rank=i`` as the script's first argument. is_command: `script` is a program that is run
    as it is. log_folder: each rank's output goes to a file there, "" for none. bind, cores: tie each process to its
    share of these cores, or of all when empty. venv_script: is sourced first, "" for none. save_pid: leave this
    process's id in a file while it runs. level: of `logging`; what the launcher itself says.
    launcher_args: for the program that reaches the hosts, after its own options. ssh_port: None means ssh's own choice.
    exported: variables for every host; their values may be secrets. show: print what would be run, and run nothing.
    """

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    nproc: int | None = None
    slots: tuple[int, ...] | None = None
    max_restarts: int = 0
    hosts: tuple[Host, ...] = ()
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    rdzv_endpoint: str = ""
    rdzv_id: str = "dscore"
    master_addr: str = ""
    master_port: int | None = None
    tag: bool = False
    grace: float = 5.0
    notice: float = 30.0
    local_rank: bool = False
    is_command: bool = False
    log_folder: str = ""
    bind: bool = False
    cores: tuple[int, ...] = ()
    venv_script: str = ""
    save_pid: bool = False
    level: int = logging.WARNING
    launcher_args: tuple[str, ...] = ()
    ssh_port: int | None = None
    exported: tuple[tuple[str, str], ...] = field(default=(), repr=False, compare=False)
    show: bool = False


Launcher = Callable[[LaunchRequest], int]


def parse_nproc(text: str) -> int | None:
    """``"auto"`` -> None, ``"4"`` -> 4. Raises CommandError for anything else."""
    if text in ("auto", "-1"):  # -1 is the documents' word for all
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise CommandError(f"--nproc {text!r} must be a whole number > 0 or 'auto' (one per accelerator)")
    return int(text)


def parse_nodes(text: str) -> tuple[int, int]:
    """``"2"`` -> (2, 2), ``"1:4"`` -> (1, 4), "" -> (0, 0): not told. Raises CommandError for anything else."""
    if text in ("", "-1"):  # -1 is the documents' word for all
        return 0, 0
    match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high:
        raise CommandError(f"--nnodes {text!r} must be a number of machines > 0, or MIN:MAX as in 1:4")
    return low, high


def check_script(script: str) -> None:
    """Raises CommandError unless `script` is a file that can be read."""
    if os.path.isdir(script):
        raise CommandError(f"{script!r} is a directory, not a script; name the .py file in it")
    if not os.path.exists(script):
        where = "" if os.path.isabs(script) else f" in {os.getcwd()!r}"
        module = "; to run a module use --module" if "/" not in script and not script.endswith(".py") else ""
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

    Raises CommandError with what is installed, or PluginError when the plugin that offers it is broken.
    """
    plugins = Plugins()
    offers = plugins.named("ds_launchers", "launcher")
    if name.lower() not in offers:
        hint = nearest(name, offers)
        fix = f"; did you mean {hint!r}?" if hint else ""
        names = ", ".join(sorted(offers))
        raise CommandError(f"no launcher is called {name!r}{fix} Installed: {names}{plugins.quarantined()}")
    chosen = offers[name.lower()]
    function = chosen.resolve(chosen.value.load, f"launcher {name!r}, which it offers by ds_launchers")
    if not callable(function):
        raise PluginError(f"launcher {name!r} of {chosen.plugin.dist}: {chosen.value.load} is not a function")

    def launcher(request: LaunchRequest) -> int:
        code = function(request)
        if not isinstance(code, int):
            raise PluginError(
                f"launcher {name!r} of {chosen.plugin.dist} returned {code!r}; it must return the exit code"
            )
        return code

    return launcher
