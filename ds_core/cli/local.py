"""The built-in launcher: processes on this machine through torch's own elastic launcher.

torch is imported inside `launch` only. torch does the rendezvous, the variables and the restarts; the `Guard` sees
to it that all end, and `failure` says what happened in our words instead of torch's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_core.cli.failure import describe, exit_code, first, gather, signal_name
from ds_core.cli.guard import Guard, Stopped
from ds_core.cli.show import say_error
from ds_core.errors import CommError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from ds_core.cli.launch import LaunchRequest

__all__ = ["launch"]

LOOPBACK = "127.0.0.1"
WORKER = str(Path(__file__).with_name("worker.py"))


def launch(request: LaunchRequest) -> int:
    """Start the processes, wait for all of them, and return the exit code of the first that failed, or 0."""
    nproc = request.nproc or _accelerators()
    with _threads_shared(nproc), _quiet_torch(), tempfile.TemporaryDirectory(prefix="dscore-") as name:
        folder = Path(name)
        with Guard(folder, request.grace) as guard:
            run = _Run(request, nproc, folder, guard)
            try:
                return run()
            finally:
                if run.failed:  # after a good end, what the script left running on purpose stays
                    guard.end()


class _Run:
    """One launch: holds what must be known when an attempt fails."""

    def __init__(self, request: LaunchRequest, nproc: int, folder: Path, guard: Guard) -> None:
        self.request, self.nproc, self.folder, self.guard = request, nproc, folder, guard
        self.attempt, self.world_size, self.failed = 0, nproc, True

    def __call__(self) -> int:
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        kind = "module" if self.request.is_module else "script"
        arguments = (WORKER, str(self.folder), kind, self.request.script, *self.request.arguments)
        try:
            elastic_launch(_launch_config(self.request, self.nproc, self._logs()), sys.executable)(*arguments)
        except ChildFailedError as error:
            known = [(rank, f.local_rank, f.pid, f.exitcode) for rank, f in error.failures.items()]
            return self._say_failure(known)
        except (SignalException, Stopped) as error:
            number = int(error.sigval) if isinstance(error, SignalException) else error.number
            self.guard.end()
            say_error(f"stopped by {signal_name(number)}; all processes were ended")
            return 128 + number
        except Exception as error:  # of the rendezvous: a port in use, an address that nobody answers
            raise CommError(_no_start(error, self.request)) from error
        self.failed = False
        return 0

    def _say_failure(self, known: list[tuple[int, int, int, int]]) -> int:
        failures, ended = gather(self.folder, self.attempt, self.guard.endings, known, self.request.grace)
        sys.stderr.write(describe(failures, ended, self.world_size) + "\n")
        return exit_code(first(failures))

    def _begins(self, envs: dict[int, dict[str, str]]) -> None:
        """Called by torch as an attempt begins, with the variables of each process."""
        some = next(iter(envs.values()))
        attempt, self.world_size = int(some["TORCHELASTIC_RESTART_COUNT"]), int(some["WORLD_SIZE"])
        if attempt > self.attempt:
            failures, ended = gather(self.folder, self.attempt, self.guard.endings, grace=self.request.grace)
            if failures:
                sys.stderr.write(describe(failures, ended, self.world_size) + "\n")
            self.guard.end(self.attempt)
            say_error(f"restart {attempt} of {self.request.max_restarts}")
        self.attempt = attempt

    def _logs(self) -> LogsSpecs:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, Std

        begins = self._begins

        class Specs(DefaultLogsSpecs):
            """Lets the processes write where we write (or, tagged, through files), and tells us of each attempt."""

            def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
                begins(envs)
                return super().reify(envs)

        logs = self.folder / "logs"
        logs.mkdir()
        return Specs(log_dir=str(logs), tee=Std.ALL if self.request.tag else Std.NONE)


def _launch_config(request: LaunchRequest, nproc: int, logs: LogsSpecs) -> LaunchConfig:
    from torch.distributed.launcher.api import LaunchConfig

    options: dict[str, Any] = _rendezvous(request)
    if "shutdown_timeout" in {field.name for field in dataclasses.fields(LaunchConfig)}:  # newer torch
        options["shutdown_timeout"] = math.ceil(request.grace) + 5
    return LaunchConfig(
        min_nodes=request.min_nodes,
        max_nodes=request.max_nodes,
        nproc_per_node=nproc,
        max_restarts=request.max_restarts,
        logs_specs=logs,
        log_line_prefix_template="[rank ${rank}] " if request.tag else None,
        **options,
    )


def _rendezvous(request: LaunchRequest) -> dict[str, Any]:
    """Where the machines meet, as torch's launcher wants it said."""
    if request.rdzv_endpoint:
        configs = {} if request.node_rank is None else {"is_host": str(request.node_rank == 0).lower()}
        return {
            "rdzv_backend": "c10d",
            "rdzv_endpoint": request.rdzv_endpoint,
            "run_id": request.rdzv_id,
            "rdzv_configs": configs,
        }
    if request.max_nodes > 1 or request.master_port is not None:
        address = request.master_addr or LOOPBACK
        return {
            "rdzv_backend": "static",
            "rdzv_endpoint": f"{address}:{request.master_port or 29500}",
            "run_id": request.rdzv_id,
            "rdzv_configs": {"rank": request.node_rank or 0},
        }
    # One machine: any free port, so that runs beside each other do not meet; no look-up of this host's name.
    return {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "localhost:0",
        "run_id": uuid.uuid4().hex,
        "local_addr": LOOPBACK,
    }


def _accelerators() -> int:
    from ds_core.accelerator import select_accelerator
    from ds_core.plugins import Plugins

    accelerator = select_accelerator(Plugins())
    return 1 if accelerator.device_type == "cpu" else max(1, accelerator.device_count())


def _no_start(error: Exception, request: LaunchRequest) -> str:
    text = f"{type(error).__name__}: {error}"
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        port = request.master_port or request.rdzv_endpoint or 29500
        return f"port {port} is already in use; choose another with --master-port, or leave it out on one machine"
    return f"the processes could not be started: {text.splitlines()[0]}"


@contextlib.contextmanager
def _threads_shared(nproc: int) -> Iterator[None]:
    """Share the cores between the processes unless the user has said how many threads each may have."""
    if "OMP_NUM_THREADS" in os.environ:
        yield
        return
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores // nproc))
    try:
        yield
    finally:
        del os.environ["OMP_NUM_THREADS"]


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """Silence torch's elastic loggers, which have each a level of their own; what they say, `failure` says better."""
    import torch.distributed.launcher.api  # noqa: F401  the loggers must be there

    noisy = ("torch.distributed.elastic", "torch.distributed.launcher")
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(noisy)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
