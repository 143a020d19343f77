"""The built-in launcher: processes on this host through torch's own elastic launcher.

torch is imported inside `launch` only. torch sets the variables and restarts, `rendezvous` lets
hosts meet, `ProcessMonitor` ends what must end, and `failure` says what happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import os
import shlex
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_command_kit.environment import environment, import_torch
from ds_command_kit.hosts.addresses import address_towards
from ds_command_kit.hosts.tools import show
from ds_command_kit.show import CommandError, say_error
from ds_command_kit.stopping import PREEMPTED, SAVED
from ds_rendezvous.meeting import is_loopback

from ds_cli.doctor.last_failure import keep
from ds_cli.local.cores import cores_of_ranks, threads_per_rank
from ds_cli.local.failure import describe, exit_code, first, gather, signal_name
from ds_cli.local.process_monitor import ProcessMonitor, Stopped
from ds_cli.local.process_setup import activated, interface_of, log_prefix, pid_file
from ds_cli.multi_host.host_monitor import Ended, HostMonitor
from ds_core.errors import CommError

if TYPE_CHECKING:
    from ds_command_kit.launch import LaunchRequest
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

LOOPBACK = "127.0.0.1"
MOST_FILES = 1 << 16  # some programs walk through all numbers that a file may have
MANY = 1_000_000
# which accelerators a process sees
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK", "ASCEND_RT_VISIBLE_DEVICES")
WORKER = str(Path(__file__).with_name("worker.py"))


def launch(request: LaunchRequest, problem: str = "") -> int:
    """Start the processes, wait for all of them, and return the exit code of the first that failed,
    or 0.

    problem: what keeps this machine from taking part in a run of several, which all should hear of.
    """
    if request.show:
        show(request, {})
        return 0
    import_torch()
    _allow_many_files()
    with contextlib.ExitStack() as stack:
        python = sys.executable
        if request.venv_script:
            stack.enter_context(environment(activated(request.venv_script)))
            python = shutil.which("python") or python
        nproc = request.nproc or _accelerators()
        cores = cores_of_ranks(nproc, request.cores) if request.bind or request.cores else []
        stack.enter_context(environment(_defaults(request, nproc, cores)))
        files = stack.enter_context(pid_file(request.save_pid))
        stack.enter_context(_quiet_torch())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dscore-")))
        logs = log_prefix(request.log_folder) if request.log_folder else ""
        (folder / "settings").write_text(
            json.dumps({"local_rank": request.local_rank, "cores": cores, "logs": logs})
        )
        processes = stack.enter_context(
            ProcessMonitor(folder, request.grace, files, request.notice)
        )
        run = _Run(request, nproc, folder, processes, python)
        run.monitor = stack.enter_context(
            HostMonitor(
                processes,
                elastic=request.min_nodes != request.max_nodes,
                restarts=request.max_restarts,
                problem=problem,
                say=run.say_and_keep,
            )
        )
        try:
            return run()
        finally:
            # After a good end, what the script left running on purpose stays.
            if run.failed:
                processes.end()


def _allow_many_files() -> None:
    """Let this process and the ranks have as many open files as the system grants, instead of the
    usual 1024.

    torch's store and gloo accept every connection: with none left, the store hears of nobody new
    and gloo aborts.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft not in (resource.RLIM_INFINITY, hard) and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _defaults(request: LaunchRequest, nproc: int, cores: list[list[int]]) -> dict[str, str | None]:
    """Variables that the processes get unless the user has set them."""
    wanted = {"OMP_NUM_THREADS": str(threads_per_rank(nproc, cores))}
    # gloo connects two ranks when they first talk, instead of each rank with all others for each
    # group (torch 2.8).
    wanted["TORCH_GLOO_LAZY_INIT"] = "1"
    if (
        request.max_nodes == 1
        and is_loopback(request.master_addr or LOOPBACK)
        and sys.platform.startswith("linux")
    ):
        wanted["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would listen at the address of this host's name
    if request.max_nodes > 1 and (interface := _interface(request)):
        # this host's name may mean a loopback address here (Debian)
        wanted["GLOO_SOCKET_IFNAME"] = interface
    changes: dict[str, str | None] = {
        name: value for name, value in wanted.items() if name not in os.environ
    }
    if request.slots is not None and request.slots != tuple(range(len(request.slots))):
        changes |= dict.fromkeys(VISIBLE, ",".join(map(str, request.slots)))
    return changes


def _interface(request: LaunchRequest) -> str:
    """The interface on the way to the other hosts, as far as their names tell; "" when
    unknown."""
    others = [host.address for host in request.hosts]
    others += [
        request.rdzv_endpoint.rpartition(":")[0] or request.rdzv_endpoint,
        request.master_addr,
    ]
    try:
        address = address_towards([name.strip("[]") for name in others if name])
    except CommandError:  # the meeting will tell of it
        return ""
    return "" if is_loopback(address) else interface_of(address)


class _Run:
    """One launch: holds what must be known when an attempt fails."""

    monitor: HostMonitor

    def __init__(
        self,
        request: LaunchRequest,
        nproc: int,
        folder: Path,
        processes: ProcessMonitor,
        python: str,
    ) -> None:
        self.request = request
        self.nproc = nproc
        self.folder = folder
        self.processes = processes
        self.python = python
        self.attempt = 0
        self.restarts = 0
        self.world_size = nproc
        self.failed = True

    def __call__(self) -> int:
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        request = self.request
        kind = "module" if request.is_module else "command" if request.is_command else "script"
        arguments = (WORKER, str(self.folder), kind, request.script, *request.arguments)
        self._say(
            logging.DEBUG, f"each process runs the {kind} {request.script!r} with {self.python}"
        )
        try:
            elastic_launch(
                _launch_config(request, self.nproc, self._logs(), self.monitor), self.python
            )(*arguments)
        except Ended as error:  # on several hosts, where all is said
            return error.code
        except ChildFailedError as error:
            known = [(rank, f.local_rank, f.pid, f.exitcode) for rank, f in error.failures.items()]
            return self._say_failure(known)
        except (SignalException, Stopped) as error:
            number = int(error.sigval) if isinstance(error, SignalException) else error.number
            # SIGTERM is a scheduler's notice: ranks that save something are waited for.
            if number == signal.SIGTERM and self.processes.heed(self.attempt):
                say_error(f"stopped by SIGTERM, {SAVED}")
                return PREEMPTED
            if (code := self.monitor.stopped()) is not None:
                return code
            self.processes.end()
            say_error(f"stopped by {signal_name(number)}; all processes were ended")
            return 128 + number
        # of the rendezvous: a port in use, an address that does not answer
        except Exception as error:
            raise CommError(_no_start(error)) from error
        self.failed = False
        return 0

    def _say_failure(self, known: list[tuple[int, int, int, int]]) -> int:
        failures, ended = gather(
            self.folder, self.attempt, self.processes.endings, known, self.request.grace
        )
        self.say_and_keep(describe(failures, ended, self.world_size))
        return exit_code(first(failures))

    def say_and_keep(self, said: str) -> None:
        """Show what is said of a failure, also to `dscore doctor --report`."""
        with contextlib.suppress(OSError):  # the reader may be gone
            sys.stderr.write(said + "\n")
            sys.stderr.flush()
        keep(said, shlex.join([self.request.script, *self.request.arguments]))

    def _begins(self, envs: dict[int, dict[str, str]]) -> None:
        """Called by torch as an attempt begins, with the variables of each process."""
        some = next(iter(envs.values()))
        attempt = int(some["TORCHELASTIC_RESTART_COUNT"])
        self.world_size = int(some["WORLD_SIZE"])
        alone = self.request.max_nodes == 1
        restarts = self.request.max_restarts
        if alone and attempt > self.attempt:
            failures, ended = gather(
                self.folder, self.attempt, self.processes.endings, grace=self.request.grace
            )
            if failures and self.request.level <= logging.WARNING:
                sys.stderr.write(describe(failures, ended, self.world_size) + "\n")
            self._say(logging.WARNING, f"restart {attempt} of {restarts}")
        elif not alone and self.monitor.used > self.restarts:
            self.restarts = self.monitor.used
            self._say(logging.WARNING, f"restart {self.restarts} of {restarts}")
        attempt = attempt if self.monitor.attempt is None else self.monitor.attempt
        # Each host's torch counts restarts by itself; the processes of all must see the same.
        for env in envs.values():
            env |= {
                "TORCHELASTIC_MAX_RESTARTS": str(restarts),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
            }
        # What is left of the attempt before would hold ports and devices.
        self.processes.forget(self.attempt)
        self.attempt = attempt
        ranks = sorted(int(env["RANK"]) for env in envs.values())
        self.monitor.ranks(attempt, ranks, self.world_size)
        self._say(
            logging.INFO,
            f"starting ranks {ranks[0]} to {ranks[-1]} of {self.world_size}; they meet at "
            f"{some['MASTER_ADDR']}:{some['MASTER_PORT']}",
        )

    def _say(self, level: int, text: str) -> None:
        if level >= self.request.level:
            say_error(text)

    def _logs(self) -> LogsSpecs:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

        begins = self._begins

        class Specs(DefaultLogsSpecs):
            """Lets the processes write where we write (or, tagged, through files), and tells us of
            each attempt.
            """

            def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
                begins(envs)
                return super().reify(envs)

        logs = self.folder / "logs"
        logs.mkdir()
        return Specs(log_dir=str(logs), tee=Std.ALL if self.request.tag else Std.NONE)


def _launch_config(
    request: LaunchRequest, nproc: int, logs: LogsSpecs, monitor: HostMonitor
) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    options: dict[str, Any] = _rendezvous(request)
    options["rdzv_configs"]["monitor"] = monitor
    # the settings that torch's launcher has
    newer = {field.name for field in dataclasses.fields(LaunchConfig)}
    if "shutdown_timeout" in newer:
        options["shutdown_timeout"] = math.ceil(max(request.grace, request.notice)) + 5
    if "signals_to_handle" in newer:  # it would take those that are ignored, too
        options["signals_to_handle"] = ",".join(number.name for number in monitor.processes.heeded)
    return LaunchConfig(
        min_nodes=request.min_nodes,
        max_nodes=request.max_nodes,
        nproc_per_node=nproc,
        # where `monitor` counts them
        max_restarts=request.max_restarts if request.max_nodes == 1 else MANY,
        logs_specs=logs,
        log_line_prefix_template="[rank ${rank}] " if request.tag else None,
        **options,
    )


def _rendezvous(request: LaunchRequest) -> dict[str, Any]:
    """Where the hosts meet, as torch's launcher wants it said."""
    if request.rdzv_endpoint:
        from ds_cli.multi_host import elastic

        elastic.register()
        host, colon, number = request.rdzv_endpoint.rpartition(":")
        endpoint = f"{host}:{number}" if colon else f"{number}:29400"
        configs: dict[str, Any] = {}
        if request.node_rank is not None:
            configs["is_host"] = str(request.node_rank == 0).lower()
        return {
            "rdzv_backend": elastic.ELASTIC,
            "rdzv_endpoint": endpoint,
            "run_id": request.rdzv_id,
            "rdzv_configs": configs,
        }
    from ds_cli.multi_host import rendezvous

    rendezvous.register()
    alone = request.max_nodes == 1
    # On one host any free port, so that runs on one host do not meet; no look-up of this
    # host's name.
    port = request.master_port or (0 if alone else 29500)
    return {
        "rdzv_backend": rendezvous.FIXED,
        "rdzv_endpoint": f"{request.master_addr or LOOPBACK}:{port}",
        "run_id": uuid.uuid4().hex if alone else request.rdzv_id,
        "rdzv_configs": {"rank": request.node_rank or 0},
    }


def _accelerators() -> int:
    from ds_core.accelerator import select_accelerator
    from ds_core.plugins import Plugins

    accelerator = select_accelerator(Plugins())
    return 1 if accelerator.device_type == "cpu" else max(1, accelerator.device_count())


def _no_start(error: Exception) -> str:
    """Of our own errors their text, of torch's the innermost cause, which says more than those
    around it.
    """
    while not isinstance(error, CommError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    text = str(error) if isinstance(error, CommError) else f"{type(error).__name__}: {error}"
    return f"the processes could not be started: {text.splitlines()[0]}"


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Silence torch's elastic loggers, which have each a level of their own; what they say,
    `failure` says better.
    """
    import torch.distributed.launcher.api  # noqa: F401  the loggers must be there

    noisy = ("torch.distributed.elastic", "torch.distributed.launcher")
    loggers = [
        logging.getLogger(name)
        for name in logging.root.manager.loggerDict
        if name.startswith(noisy)
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
