"""What communication costs: per operation, call site and message size, counts, time and bandwidth
(torch-free).

Bandwidths are in GB/s (1e9 bytes). algbw is message bytes over time; busbw corrects it for how
often each byte must cross the wire, so that it can be held against the hardware's whatever the
number of ranks.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ds_comms_logger.config import CommsLogger
from ds_core.comm.interceptor import (
    OPERATIONS,
    Collective,
    Interceptor,
    add_interceptor,
    interceptors,
    remove_interceptor,
)
from ds_core.errors import ConfigError, Problem, nearest
from ds_core.process import show_log

log = logging.getLogger("ds_core.comm")

# Factor of busbw over algbw at n ranks; operations not named here have 1.
_BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(
        ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"),
        lambda n: (n - 1) / n,
    ),
}

# Functions whose calls are logged as another operation.
_LOGGED_AS = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
    "all_reduce_coalesced": "all_reduce",
    "all_gather_coalesced": "all_gather_into_tensor",
    "inference_all_reduce": "all_reduce",
}


@dataclass(frozen=True, slots=True)
class CommsRow:
    """One line of the summary.

    bytes: of one message.
    site: where it was called, "" without `debug`.
    algbw, busbw: GB/s over all calls.
    straggler_ms: the total time of the slowest rank less that of the fastest; None unless asked
        for.
    fastest_ms: the total time of the fastest rank; None unless asked for.
    """

    op: str
    site: str
    bytes: int
    count: int
    total_ms: float
    average_ms: float
    algbw: float
    busbw: float
    straggler_ms: float | None = None
    fastest_ms: float | None = None


@dataclass(slots=True)
class _Tally:
    ranks: int
    count: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class CommsLog(Interceptor):
    """Times each collective, synchronised, and adds it up.

    ops: the operations to log, None for all.
    verbose: log every call.
    debug: keep call sites apart.
    """

    ops: frozenset[str] | None = None
    verbose: bool = False
    debug: bool = False
    _tallies: dict[tuple[str, str, int], _Tally] = field(default_factory=dict)

    def around(self, collective: Collective, call: Callable[[], Any]) -> Any:
        """Run `call` to its end and record it; what `call` returns (for async: a finished work)."""
        op = collective.op
        ranks = collective.group.size()
        if op not in OPERATIONS or (self.ops is not None and op not in self.ops):
            return call()
        device, size = _message(collective)
        site = _call_site() if self.debug else ""
        # The device may still be busy with what came before: that must not count.
        _synchronize(device)
        begin = time.perf_counter()
        result = call()
        # waiting here could block both ends; its own wait ends the time
        if op in ("isend", "irecv"):
            return _TimedWork(
                result, lambda: self.record(op, site, size, ranks, time.perf_counter() - begin)
            )
        # Its time is known when it is done, so it is waited for; the caller gets a finished work.
        if collective.arguments.get("async_op"):
            result.wait()
            result = _Finished()
        _synchronize(device)
        self.record(op, site, size, ranks, time.perf_counter() - begin)
        return result

    def record(self, op: str, site: str, size: int, ranks: int, seconds: float) -> None:
        """Add one call of `op` with a message of `size` bytes among `ranks` ranks."""
        tally = self._tallies.setdefault((op, site, size), _Tally(ranks))
        tally.count += 1
        tally.seconds += seconds
        if self.verbose:
            algbw, busbw = bandwidths(op, size, ranks, seconds)
            where = f" at {site}" if site else ""
            log.info(
                "%s%s: %d bytes, %.3f ms, algbw %.3f GB/s, busbw %.3f GB/s",
                op,
                where,
                size,
                seconds * 1e3,
                algbw,
                busbw,
            )

    def clear(self) -> None:
        """Forget what was recorded, such as a warm-up, and go on."""
        self._tallies.clear()

    def rows(self) -> list[CommsRow]:
        """What was recorded on this rank, by operation, call site and size."""
        rows = []
        for (op, site, size), tally in sorted(self._tallies.items()):
            average = tally.seconds / tally.count
            algbw, busbw = bandwidths(op, size, tally.ranks, average)
            rows.append(
                CommsRow(
                    op, site, size, tally.count, tally.seconds * 1e3, average * 1e3, algbw, busbw
                )
            )
        return rows


def unknown_operations(section: CommsLogger) -> list[Problem]:
    """What is wrong with ``prof_ops`` of a section that is enabled."""
    return [
        Problem(
            "comms_logger.prof_ops",
            f"{name!r} is no operation"
            + (f"; did you mean {near!r}?" if (near := nearest(name, OPERATIONS)) else ""),
            f"known: {', '.join(sorted(OPERATIONS))}",
        )
        for name in section.prof_ops
        if section.enabled and _LOGGED_AS.get(name, name) not in OPERATIONS
    ]


def installed_log() -> CommsLog | None:
    """The log that is called around collectives now."""
    return next((i for i in interceptors() if isinstance(i, CommsLog)), None)


def configure(section: CommsLogger | Mapping[str, Any]) -> CommsLog | None:
    """Put a ``comms_logger`` section into effect; the log that is on then, None if it is off.

    What was recorded so far is kept if it stays on. Every rank calls it. Raises ConfigError for a
    ``prof_ops`` entry that is no operation.
    """
    if not isinstance(section, CommsLogger):
        section = CommsLogger.model_validate(dict(section))
    if problems := unknown_operations(section):
        raise ConfigError(problems)
    log = installed_log()
    if not section.enabled:
        if log is not None:
            remove_interceptor(log)
        return None
    if log is None:
        add_interceptor(log := CommsLog())
    log.ops = (
        None if section.prof_all else frozenset(_LOGGED_AS.get(op, op) for op in section.prof_ops)
    )
    log.verbose = section.verbose
    log.debug = section.debug
    if log.verbose:
        show_log()
    return log


def bandwidths(op: str, size: int, ranks: int, seconds: float) -> tuple[float, float]:
    """(algbw, busbw) in GB/s of one call."""
    algbw = size / seconds / 1e9 if seconds > 0 else 0.0
    return algbw, algbw * (_BUS[op](ranks) if op in _BUS else 1.0)


class _Finished:
    """The work of a call that the log has already waited for."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _TimedWork:
    """A point-to-point work that is recorded when it has been waited for."""

    def __init__(self, work: Any, record: Callable[[], None]) -> None:
        self._work = work
        self._record = record
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done:
            self._work.wait() if timeout is None else self._work.wait(timeout)
            self._done = True
            self._record()
        return True

    def is_completed(self) -> bool:
        return self._done or bool(self._work.is_completed())


def _message(collective: Collective) -> tuple[str, int]:
    """The device type of a collective's message and its bytes."""
    message = collective.message
    return ("cpu", 0) if message is None else (message.device.type, message.nbytes)


def _call_site() -> str:
    """``file.py:line in function`` of the nearest frame outside ds_core.comm and this package."""
    # Frames of the core's collectives and of this package say nothing about who communicates.
    frame = sys._getframe(1)
    while (
        frame.f_globals.get("__name__", "").startswith(("ds_core.comm", "ds_comms_logger."))
        and frame.f_back is not None
    ):
        frame = frame.f_back
    name = frame.f_code.co_filename.rsplit("/", 1)[-1]
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _synchronize(device: str) -> None:
    if device != "cpu":
        from ds_core.accelerator import get_accelerator

        get_accelerator().synchronize()
