"""What a launcher is given: a `LaunchRequest` (torch-free)."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from ds_command_kit.hosts.hostfile import Host
from ds_command_kit.show import CommandError


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
    """Processes per host; None: one per accelerator, or 1 where there is none."""
    slots: tuple[int, ...] | None = None
    """The numbers of the accelerators to use here; None: all."""
    max_restarts: int = 0
    """How often all processes are started again after one fails."""
    hosts: tuple[Host, ...] = ()
    """The hosts to start on, of which the first has number 0; empty: this one, or those that the
    launcher finds.
    """
    min_nodes: int = 1
    max_nodes: int = 1
    """How many hosts; 0 lets the launcher decide, and the two are equal where the run is not
    elastic.
    """
    node_rank: int | None = None
    """The number of this machine; None lets the rendezvous decide."""
    rdzv_endpoint: str = ""
    """``host[:port]`` where hosts meet; "": none."""
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
        raise CommandError(f"--nnodes {text!r} must be a number of hosts > 0, or MIN:MAX as in 1:4")
    return low, high
