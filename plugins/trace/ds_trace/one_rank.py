"""Where the steps of one rank went, from its trace (torch-free).

On the CPU a collective costs what the program waits: the time in the call, and in the `wait` of one
that runs in the background. On a GPU it costs what the device waits: the time in which kernels of
collectives run and no others do. A rank computes while operations (on a GPU: other kernels and
copies) run, and is idle in the rest of its steps.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds_core.errors import UsageError
from ds_trace.names import COMM, PHASE, STEP, WAIT, Named, parse_comm
from ds_trace.reading import read_trace
from ds_trace.spans import Span, clip, length, merge, overlap, without

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_COMM_KERNEL = re.compile("nccl|rccl|oneccl", re.IGNORECASE)
_COMM_OPERATION = re.compile(r"gloo:|nccl:|c10d::|record_param_comms")
TOP_PHASES = ("forward", "backward", "step")


@dataclass(slots=True)
class Made:
    """One collective of this rank; all times in milliseconds."""

    named: Named
    # The begin, counted from the first traced step.
    begin: float
    # The time in which the rank computed nothing for it.
    cost: float = 0.0
    # The time from begin to end, if it is known; otherwise as `cost`.
    taken: float = 0.0


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Where the traced steps of one rank went, in milliseconds of all of them."""

    rank: int
    world: int
    device: str
    # How many steps were traced.
    steps: int
    total: float
    # Operations ran, or for collectives nothing did.
    compute: float
    stalled: float
    # Own time of each top-level phase, without collectives; "between" is the time in none:
    # loading data, logging, evaluation.
    phases: dict[str, float]
    # Collectives by key.
    made: dict[str, Made]

    @property
    def idle(self) -> float:
        """Milliseconds in which nothing ran and nothing was waited for."""
        return max(0.0, self.total - self.compute - self.stalled)


@dataclass(slots=True)
class _Seen:
    """What of a file matters; times in microseconds."""

    head: dict[str, Any] = field(default_factory=dict)
    steps: list[Span] = field(default_factory=list)
    threads: set[Any] = field(default_factory=set)
    phases: dict[bool, list[tuple[str, float, float]]] = field(
        default_factory=lambda: {True: [], False: []}
    )
    comms: dict[bool, list[tuple[str, float, float, Any]]] = field(
        default_factory=lambda: {True: [], False: []}
    )
    operations: array[float] = field(default_factory=lambda: array("d"))
    kernels: array[float] = field(default_factory=lambda: array("d"))
    comm_kernels: list[tuple[str, float, float]] = field(default_factory=list)

    def take(self, event: dict[str, Any]) -> None:
        """One event; those of the device are kept apart from those of the program."""
        if event.get("ph") != "X":
            return
        kind = event.get("cat")
        name = str(event.get("name", ""))
        try:
            begin = float(event["ts"])
            end = begin + float(event.get("dur", 0))
        except (KeyError, TypeError, ValueError, OverflowError):
            return  # of no profiler
        if kind in ("user_annotation", "gpu_user_annotation"):
            self._range(name, begin, end, event.get("tid"), on_device=kind != "user_annotation")
        elif kind == "cpu_op":
            if not _COMM_OPERATION.match(name):
                self.operations.extend((begin, end))
        elif kind in _ON_DEVICE:
            if _COMM_KERNEL.search(name):
                self.comm_kernels.append((name, begin, end))
            else:
                self.kernels.extend((begin, end))

    def _range(self, name: str, begin: float, end: float, thread: Any, *, on_device: bool) -> None:
        if name.startswith(PHASE):
            self.phases[on_device].append((name[len(PHASE) :], begin, end))
        elif name.startswith((COMM, WAIT)):
            self.comms[on_device].append((name[len(COMM) :], begin, end, thread))
        elif name.startswith(STEP) and not on_device:
            self.steps.append((begin, end))
            self.threads.add(thread)

    @property
    def has_device(self) -> bool:
        return bool(self.kernels or self.comm_kernels)


def read_rank(path: Path) -> RankTrace:
    """Read one rank's file. Raises UsageError if it holds no steps, or is no trace of dscore-trace."""
    seen = _Seen()
    for event in read_trace(path, seen.head.__setitem__):
        seen.take(event)
    about = seen.head.get("ds_core")
    if not isinstance(about, dict) or not {"rank", "world"} <= about.keys():
        raise UsageError(f"{path}: was not written by the section torch_profiler of dscore-trace")
    # The profiler may write a step that was cut off by the run's end.
    whole = sorted(seen.steps)[: int(about.get("steps", len(seen.steps)))]
    if not whole:
        raise UsageError(
            f"{path}: holds no whole step; did the run end before the traced steps were over?"
        )
    begin = whole[0][0]
    end = whole[-1][1]
    if seen.has_device:
        end, stalls, busy = _on_device(seen, begin, end)
    else:
        stalls, busy = _on_host(seen, begin, end)
    stalled = merge((b, e) for _, b, e in stalls)
    compute = without(merge(clip(busy, begin, end)), stalled)
    return RankTrace(
        rank=int(about["rank"]),
        world=int(about["world"]),
        device=str(about.get("device", "cpu")),
        steps=len(whole),
        total=(end - begin) / 1e3,
        compute=length(compute) / 1e3,
        stalled=length(stalled) / 1e3,
        phases=_phases(seen.phases[seen.has_device], (begin, end), stalled),
        made=_made(stalls, seen, begin),
    )


Stall = tuple[str, float, float]


def _pairs(flat: array[float]) -> Iterable[Span]:
    return zip(flat[::2], flat[1::2], strict=True)


def _on_host(seen: _Seen, begin: float, end: float) -> tuple[list[Stall], Iterable[Span]]:
    """Of the thread that trains: its collectives, outermost where one is made in another; and all
    operations.
    """
    # Of two that begin together the longer comes first: it is the outer one.
    mine = sorted((b, -e, n) for n, b, e, thread in seen.comms[False] if thread in seen.threads)
    stalls: list[Stall] = []
    for b, negative, name in mine:
        e = min(-negative, end)
        if b < begin or b >= end or (stalls and b < stalls[-1][2]):
            continue
        stalls.append((name, b, e))
    return stalls, _pairs(seen.operations)


def _on_device(seen: _Seen, begin: float, end: float) -> tuple[float, list[Stall], Iterable[Span]]:
    """When the device has done the work, and collectives where nothing else runs on it.

    What was queued before does not count.
    """
    kernels = list(_pairs(seen.kernels))
    # The device may finish after the program has left the last step.
    end = max([end, *(e for _, e in kernels), *(e for _, _, e in seen.comm_kernels)])
    computing = merge(clip(kernels, begin, end))
    named = [(name, b, e) for name, b, e, _ in seen.comms[True]]
    covered = merge((b, e) for _, b, e in named)
    # Kernels outside of named ranges are those of collectives that others than ds_core have made.
    unnamed = [(n, b, e) for n, b, e in seen.comm_kernels if not overlap((b, e), covered)]
    stalls = []
    for name, b, e in named + unnamed:
        stalls += [(name, x, y) for x, y in without(clip([(b, e)], begin, end), computing)]
    return end, stalls, computing


def _phases(
    phases: Iterable[tuple[str, float, float]], window: Span, stalled: list[Span]
) -> dict[str, float]:
    """Own milliseconds per top-level phase, and of the time between them."""
    found = dict.fromkeys(TOP_PHASES, 0.0)
    inside: list[Span] = []
    for name, begin, end in phases:
        for span in clip([(begin, end)], *window) if name in found else ():
            found[name] += (span[1] - span[0] - overlap(span, stalled)) / 1e3
            inside.append(span)
    found["between"] = length(without(without([window], merge(inside)), stalled)) / 1e3
    return found


def _made(stalls: Iterable[Stall], seen: _Seen, begin: float) -> dict[str, Made]:
    """Collectives by key, with what each cost.

    Unnamed kernels are kept by name, without a key that others share.
    """
    made: dict[str, Made] = {}
    for text, b, e in stalls:
        named = parse_comm(text) or Named(text.split("(")[0], "", 0, "", f"unnamed {text}")
        one = made.setdefault(named.key, Made(named, (b - begin) / 1e3))
        one.cost += (e - b) / 1e3
    for text, b, e, _ in seen.comms[True]:
        if (known := parse_comm(text)) is not None:
            made.setdefault(known.key, Made(known, (b - begin) / 1e3)).taken += (e - b) / 1e3
    for one in made.values():
        one.taken = one.taken or one.cost
    return made
