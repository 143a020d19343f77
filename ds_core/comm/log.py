"""What communication costs: per operation, call site and message size, counts, time and bandwidth (torch-free).

Bandwidths are in GB/s (1e9 bytes). algbw is message bytes over time; busbw corrects it for how often each byte must
cross the wire, so that it can be held against the hardware's whatever the number of ranks.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

from ds_core.comm.interceptor import OPERATIONS, Collective, Interceptor, add_interceptor, remove_interceptor
from ds_core.errors import ConfigError, Problem, nearest

__all__ = ["CommsLog", "CommsRow", "configure", "log_summary", "reset"]

log = logging.getLogger("ds_core.comm")

# Factor of busbw over algbw at n ranks; operations not named here have 1.
_BUS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    **dict.fromkeys(
        ("all_gather_into_tensor", "all_gather", "reduce_scatter_tensor", "all_to_all_single", "gather", "scatter"),
        lambda n: (n - 1) / n,
    ),
}
_TIMES_RANKS = ("gather", "scatter")


@dataclass(frozen=True, slots=True)
class CommsRow:
    """One line of the summary. bytes: of one message. site: where it was called, "" without `debug`.

    algbw, busbw: GB/s over all calls. straggler_ms: the total time of the slowest rank less that of the fastest,
    None unless it was asked for.
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


@dataclass(slots=True)
class _Tally:
    ranks: int
    count: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class CommsLog(Interceptor):
    """Times each collective, synchronised, and adds it up.

    ops: the operations to log, None for all. verbose: log every call. debug: keep call sites apart.
    """

    ops: frozenset[str] | None = None
    verbose: bool = False
    debug: bool = False
    _tallies: dict[tuple[str, str, int], _Tally] = field(default_factory=dict)

    def around(self, collective: Collective, call: Callable[[], Any]) -> Any:
        """Run `call` to its end and record it; what `call` returns (for async: a finished work)."""
        op, ranks = collective.op, collective.group.size()
        if op not in OPERATIONS or (self.ops is not None and op not in self.ops):
            return call()
        device, size = _message(collective, ranks)
        site = _call_site() if self.debug else ""
        _synchronize(device)
        begin = time.perf_counter()
        result = call()
        if op in ("isend", "irecv"):  # waiting here could block both ends; its own wait ends the time
            return _TimedWork(result, lambda: self.record(op, site, size, ranks, time.perf_counter() - begin))
        if collective.argument("async_op"):
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
            rows.append(CommsRow(op, site, size, tally.count, tally.seconds * 1e3, average * 1e3, algbw, busbw))
        return rows


# The log that is on, or None; the collectives look at it once per call.
active: CommsLog | None = None


def configure(section: Any) -> None:
    """Put a `comms_logger` section (its model, or a mapping) into effect; what was recorded so far is kept if on.

    Raises ConfigError for a `prof_ops` entry that is no operation.
    """
    global active
    get: Callable[[str, Any], Any]
    get = section.get if isinstance(section, Mapping) else lambda name, default: getattr(section, name, default)
    if not get("enabled", False):
        reset()
        return
    names = list(get("prof_ops", []))
    problems = [
        Problem(
            "comms_logger.prof_ops",
            f"{name!r} is no operation"
            + (f"; did you mean {near!r}?" if (near := nearest(str(name), OPERATIONS)) else ""),
            f"known: {', '.join(sorted(OPERATIONS))}",
        )
        for name in names
        if name not in OPERATIONS
    ]
    if problems:
        raise ConfigError(problems)
    ops = None if get("prof_all", True) else frozenset(names)
    kept = active._tallies if active is not None else {}
    reset()
    active = CommsLog(ops, bool(get("verbose", False)), bool(get("debug", False)), kept)
    add_interceptor(active)


def reset() -> None:
    """Switch the log off and forget what was recorded."""
    global active
    if active is not None:
        remove_interceptor(active)
        active = None


def log_summary(show_straggler: bool = False) -> list[CommsRow]:
    """Print the summary on rank 0 and return this rank's rows; empty when the log is off.

    show_straggler: also how far the slowest rank is behind the fastest, per row; collective then, so that every
    rank must call it.
    """
    rows = active.rows() if active is not None else []
    if show_straggler:
        rows = _with_stragglers(rows)
    from ds_core.comm.collectives import rank

    if rank() == 0:
        _show(rows, show_straggler)
    return rows


def bandwidths(op: str, size: int, ranks: int, seconds: float) -> tuple[float, float]:
    """(algbw, busbw) in GB/s of one call."""
    algbw = size / seconds / 1e9 if seconds > 0 else 0.0
    return algbw, algbw * (_BUS[op](ranks) if op in _BUS else 1.0)


def _with_stragglers(rows: Iterable[CommsRow]) -> list[CommsRow]:
    """`rows` with the spread of total time over the ranks that have the same row."""
    from ds_core.comm.objects import all_gather_json

    rows = list(rows)
    if (log := active) is not None:
        remove_interceptor(log)  # the exchange itself is not part of what is measured
    try:
        everyone = all_gather_json([[row.op, row.site, row.bytes, row.total_ms] for row in rows])
    finally:
        if log is not None:
            add_interceptor(log)
    totals: dict[tuple[str, str, int], list[float]] = {}
    for op, site, size, total in (entry for entries in everyone for entry in entries):
        totals.setdefault((op, site, size), []).append(total)
    spread = {key: max(values) - min(values) for key, values in totals.items()}
    return [CommsRow(**{**asdict(row), "straggler_ms": spread[row.op, row.site, row.bytes]}) for row in rows]


def _show(rows: Sequence[CommsRow], straggler: bool) -> None:
    heads = [
        "op",
        "site",
        "bytes",
        "count",
        "total ms",
        "avg ms",
        "algbw GB/s",
        "busbw GB/s",
        *(["straggler ms"] if straggler else []),
    ]
    cells = [
        [
            row.op,
            row.site,
            str(row.bytes),
            str(row.count),
            *(f"{value:.3f}" for value in (row.total_ms, row.average_ms, row.algbw, row.busbw)),
            *([f"{row.straggler_ms or 0.0:.3f}"] if straggler else []),
        ]
        for row in rows
    ]
    if not any(row.site for row in rows):
        heads.pop(1)
        for line in cells:
            line.pop(1)
    if sys.stdout.isatty() and _show_rich(heads, cells):
        return
    widths = [max(len(line[i]) for line in [heads, *cells]) for i in range(len(heads))]
    for line in [heads, *cells]:
        texts = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        print("  ".join(texts).rstrip())


def _show_rich(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> bool:
    """Print a table, unless the terminal is too narrow for its figures."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table, console = Table(*heads, title="communication", box=SIMPLE_HEAD, pad_edge=False), Console()
    for column in table.columns[1:]:
        column.justify = "right"
    for line in cells:
        table.add_row(*line)
    if console.measure(table, options=console.options.update(width=1000)).maximum > console.width:
        return False
    console.print(table)
    return True


class _Finished:
    """The work of a call that the log has already waited for."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _TimedWork:
    """A point-to-point work that is recorded when it has been waited for."""

    def __init__(self, work: Any, record: Callable[[], None]) -> None:
        self._work, self._record = work, record
        self._done = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._done:
            self._work.wait() if timeout is None else self._work.wait(timeout)
            self._done = True
            self._record()
        return True

    def is_completed(self) -> bool:
        return self._done or bool(self._work.is_completed())


def _message(collective: Collective, ranks: int) -> tuple[str, int]:
    """The device type of a collective's message and the bytes of it all."""
    tensors = collective.message
    if not tensors:
        return "cpu", 0
    size = sum(int(t.numel()) * int(t.element_size()) for t in tensors)
    return str(tensors[0].device.type), size * (ranks if collective.op in _TIMES_RANKS else 1)


def _call_site() -> str:
    """``file.py:line in function`` of the nearest frame outside ds_core.comm."""
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").startswith("ds_core.comm") and frame.f_back is not None:
        frame = frame.f_back
    name = frame.f_code.co_filename.rsplit("/", 1)[-1]
    return f"{name}:{frame.f_lineno} in {frame.f_code.co_name}"


def _synchronize(device: str) -> None:
    if device != "cpu":
        from ds_core.accelerator import get_accelerator

        get_accelerator().synchronize()
