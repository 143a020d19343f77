"""`Recorder`: what one rank writes down of its run.

Two files per rank: ``rank0.jsonl``, lines of JSON that are only ever appended, and ``rank0.now``,
one line that is overwritten in place and says what the rank is doing. docs/reports.md describes
them.

[Note: never in the way] A step puts its line into a queue. One thread turns lines into JSON (where
that reads a tensor, the thread waits, not the step), appends them in one write per interval, and
reads the memory that is in use. A folder that cannot be written ends the record with one warning.
Where the disk stands still, lines are dropped and counted.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_core.config.redaction import scrub, secrets_in

if TYPE_CHECKING:
    from ds_core.accelerator import Accelerator
    from ds_core.context import Context
    from ds_report.config import RunRecord

log = logging.getLogger("ds_report")
FORMAT = 1
NOW_BYTES = 512
"""Size of the file ``rankN.now``: one write, so that a reader seldom sees half of it; it looks
again when it does.
"""
MOST_WAITING = 200_000


class Recorder:
    """The record of one engine on this rank. It begins with a line ``start``, which has `facts`.

    seconds: between two writes.
    secrets: texts that no line may hold.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        facts: Mapping[str, Any],
        accelerator: Accelerator,
        *,
        seconds: float = 1.0,
        secrets: frozenset[str] = frozenset(),
    ) -> None:
        self.rank = rank
        self._seconds = seconds
        self._secrets = secrets
        self._accelerator = accelerator
        # so that no change of the clock makes time go back
        self._clock = time.time() - time.perf_counter()
        self._waiting: deque[dict[str, Any]] = deque()
        self._lost = 0
        self._phases: list[tuple[str, float]] = []
        self._idle_since = time.perf_counter()
        self._ms: dict[str, float] = {}
        self._step = 0
        self._state = "running"
        self._files: tuple[int, int] | None = None
        self._pid = os.getpid()
        self._stop = threading.Event()
        self._writing = threading.Lock()
        try:
            self.folder, self._files = _open(folder, rank)
        except OSError as error:
            self._give_up(error)
            return
        self.add("start", format=FORMAT, **facts)
        self._write()
        device = accelerator.current_index()
        self._thread = threading.Thread(
            target=self._run, args=(device,), name="dscore-report", daemon=True
        )
        self._thread.start()
        atexit.register(self.end, "ended")

    @classmethod
    def of(cls, ctx: Context, section: RunRecord) -> Recorder:
        """The record that a config asks for."""
        secrets = frozenset(secrets_in(ctx.config.raw))
        return cls(
            section.directory(),
            ctx.rank,
            _facts(ctx, section),
            ctx.accelerator,
            seconds=section.seconds,
            secrets=secrets,
        )

    # -- called by the run -------------------------------------------------------------------------

    def add(self, kind: str, **facts: Any) -> None:
        """Put one line into the queue."""
        if self._files is None:
            return
        # The disk does not keep up; the record must not fill the memory.
        if len(self._waiting) >= MOST_WAITING:
            self._lost += 1
            return
        self._waiting.append({"kind": kind, "time": self._clock + time.perf_counter(), **facts})

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """An optimizer step is done, the `step`-th of the run."""
        self._step = step
        # A new dict, since the other thread may not have written the old one yet.
        ms, self._ms = self._ms, {}
        # as they are: reading a number on a device waits for it
        values = getattr(metrics, "data", metrics)
        self.add("step", step=step, metrics=dict(values), host_ms=ms)

    def phase_begin(self, phase: str) -> None:
        """This rank is in `phase` now."""
        self._phases.append((phase, time.perf_counter()))

    def phase_end(self, phase: str) -> None:
        """The phase that began last is over."""
        now = time.perf_counter()
        if self._phases:
            name, start = self._phases.pop()
            self._ms[name] = self._ms.get(name, 0.0) + (now - start) * 1e3
        self._idle_since = now

    def end(self, state: str, error: BaseException | None = None) -> None:
        """Write what waits and a last line, once: "finished", "failed" with the error, or "ended"
        with the process.
        """
        if self._state != "running" or os.getpid() != self._pid:  # a forked child has a copy
            return
        self._state = state
        atexit.unregister(self.end)
        said = {} if error is None else {"error": _text_of(error, self._secrets)}
        self.add("end", state=state, step=self._step, **said)
        # The last lines are written here: the thread may not come to it before the process ends.
        self._stop.set()
        self._write()
        with self._writing:
            files, self._files = self._files, None
            for file in files or ():
                os.close(file)
        if files is not None and state == "finished" and not hasattr(sys, "ps1"):
            last = (self._pid, self._step, self._secrets, getattr(sys, "last_value", None))
            atexit.register(_fail_after_all, self.folder / f"rank{self.rank}.jsonl", *last)

    # -- in the background -------------------------------------------------------------------------

    def _run(self, device: int) -> None:
        with contextlib.suppress(Exception):  # a thread starts on device 0
            self._accelerator.set_device(device)
        while not self._stop.wait(self._seconds):
            self._write()

    def _write(self) -> None:
        """Append what waits, and say what this rank is doing."""
        with self._writing:
            if self._files is None:
                return
            lines, now = self._files
            memory = self._memory()
            # As many as there are now: the run may add lines meanwhile.
            rows = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if any(row["kind"] in ("start", "step") for row in rows):
                rows.append(
                    {
                        "kind": "memory",
                        "time": self._clock + time.perf_counter(),
                        "step": self._step,
                        **memory,
                    }
                )
            # The record notes how many lines were dropped, at the place where they are missing.
            if self._lost:
                rows.append(
                    {"kind": "lost", "time": self._clock + time.perf_counter(), "lines": self._lost}
                )
                self._lost = 0
            try:
                _append(lines, "".join(map(_line, rows)).encode())
                os.pwrite(now, self._doing(memory), 0)
            except OSError as error:
                self._give_up(error)

    def _doing(self, memory: Mapping[str, int]) -> bytes:
        phases = self._phases[-1:]  # a copy: the run continues meanwhile
        phase, since = phases[0] if phases else ("", self._idle_since)
        facts: dict[str, Any] = {
            "time": self._clock + time.perf_counter(),
            "state": self._state,
            "step": self._step,
            "phase": phase,
            "since": self._clock + since,
            "seconds": self._seconds,
            "pid": self._pid,
            "host": socket.gethostname()[:64],
            **memory,
        }
        return json.dumps(facts).encode().ljust(NOW_BYTES - 1)[: NOW_BYTES - 1] + b"\n"

    def _memory(self) -> dict[str, int]:
        try:
            used = self._accelerator.memory_allocated()
            peak = self._accelerator.max_memory_allocated()
        # a device that cannot say, or that is failing: the record of that is worth more
        except Exception:
            return {}
        return {"allocated": used, "peak": peak}

    def _give_up(self, error: OSError) -> None:
        self._stop.set()
        self._files = None
        self._waiting.clear()
        log.warning(
            "run_record: rank %d writes no record (any more): %s; training continues",
            self.rank,
            error,
        )


def _facts(ctx: Context, section: RunRecord) -> dict[str, Any]:
    """What the line ``start`` says of a run."""
    import platform

    import torch

    config = ctx.config.redacted()
    mesh = ctx.mesh
    return {
        "rank": ctx.rank,
        "world_size": ctx.world_size,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        # its arguments may hold secrets
        "script": os.path.basename(sys.argv[0]) if sys.argv else "",
        "device": ctx.accelerator.name,
        "memory": ctx.accelerator.total_memory(),
        "mesh": mesh.describe(),
        "config": config,
        "overrides": _overridden(config),
        "precision": ctx.precision.name,
        "parameters": sum(getattr(p, "ds_numel", p.numel()) for p in ctx.module.parameters())
        if ctx.module is not None
        else 0,
        "total_steps": section.total_steps or _scheduled(config),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            **dict(v.rsplit(" ", 1) for v in ctx.plugins.loaded_versions().values() if " " in v),
        },
    }


def _overridden(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that DS_CONFIG_OVERRIDES (``dscore run --set``) has, with their values in the config."""
    from ds_core.config import read_config

    found: dict[str, Any] = {}
    for key in read_config(os.environ.get("DS_CONFIG_OVERRIDES") or {}).raw:
        value: Any = config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        if key != "run_record":
            found[key] = value
    return found


def _scheduled(config: Mapping[str, Any]) -> int | None:
    """How many steps the learning-rate schedule of a config is for."""
    found: Any = config.get("scheduler")
    for key in ("params", "total_num_steps"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if type(found) is int else None


# -- files -----------------------------------------------------------------------------------------


def _open(folder: Path, rank: int) -> tuple[Path, tuple[int, int]]:
    """The folder, and the two files of this rank. Raises OSError.

    Where another engine, of this process or of another run, still writes them, a folder ``engine2``
    in it is used.
    """
    import fcntl

    for place in (folder, *(folder / f"engine{i}" for i in range(2, 100))):
        place.mkdir(parents=True, exist_ok=True)
        lines = os.open(
            place / f"rank{rank}.jsonl", os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666
        )
        try:
            fcntl.flock(lines, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lines)
            continue
        except OSError:  # a file system without locks
            pass
        size = os.fstat(lines).st_size
        if size and os.pread(lines, 1, size - 1) != b"\n":  # a killed run left half a line
            _append(lines, b"\n")
        return place, (
            lines,
            os.open(place / f"rank{rank}.now", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666),
        )
    raise OSError(f"{folder}: a hundred engines write their records there")


def _append(file: int, block: bytes) -> None:
    """Append all of it, or, when that fails, nothing of it. Raises OSError."""
    size = os.fstat(file).st_size
    rest = memoryview(block)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, size)
        raise


def _fail_after_all(
    path: Path, pid: int, step: int, secrets: frozenset[str], before: BaseException | None
) -> None:
    """The process ends: if an exception ended it after the engine was destroyed, the run failed.

    before: the last exception that the interpreter had printed when the engine was destroyed.
    """
    # Set by the interpreter when an exception ends the program.
    error = getattr(sys, "last_value", None)
    if error is None or error is before or os.getpid() != pid:
        return
    row = {"kind": "end", "time": time.time(), "state": "failed", "step": step}
    row["error"] = _text_of(error, secrets)
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        try:
            _append(file, _line(row).encode())
        finally:
            os.close(file)


def _text_of(error: BaseException, secrets: frozenset[str]) -> str:
    """The error's type and first line, without secrets."""
    first = (str(error).splitlines() or [""])[0][:500]
    kind = type(error).__name__
    return scrub(f"{kind}: {first}" if first else kind, secrets)


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps({key: _plain(value) for key, value in row.items()}) + "\n"


def _plain(value: Any) -> Any:
    """`value` with numbers that JSON has: those that are not finite become "NaN", "Infinity" and
    "-Infinity".
    """
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if not isinstance(value, (str, int, float, bool, type(None))):
        value = _number(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value


def _number(value: Any) -> Any:
    """A tensor of one element as a number; anything else as its text."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        return str(value)
