"""The part inside a run that a tuner started: time its steps, or measure its model, write that
down, and end it.

[Note: how a trial ends] A script that honours ``engine.should_stop`` would save a checkpoint over
the user's, and one that does not would train on. So when enough is measured every rank tells
monitors and observers that the run is over, meets the others, and ends its process with exit code
0, from within ``engine.step()``.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_autotuning.records import Result, Status, write_json
from ds_core import comm
from ds_core.accelerator.cpu import CpuAccelerator
from ds_core.config.redaction import scrub, secrets_in

if TYPE_CHECKING:
    from ds_autotuning.config import Autotuning
    from ds_core.context import Context
    from ds_core.entries import Request

LONGEST = 500
"""Characters of an error that a result keeps."""


def end_process() -> None:
    """End this process with exit code 0, whatever its threads, ``finally`` clauses and children
    would do.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had no memory left; torch's allocator of the CPU has no class of
    its own for it.
    """
    import torch

    text = str(error).lower()
    known = (
        "out of memory" in text
        or "can't allocate memory" in text
        or "cannot allocate memory" in text
    )
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or known


def profile_path(section: Autotuning) -> Path | None:
    """Where this run writes the model's profile: at `model_info_path`, or beside its result where
    one is asked for.
    """
    if section.model_info_path is not None:
        return Path(section.model_info_path)
    asked = (
        section.model_info is not None
        and section.model_info.profile
        and section.metric_path is not None
    )
    return (
        Path(section.metric_path).with_name("profile.json")
        if asked and section.metric_path
        else None
    )


class Measuring:
    """Of one rank.

    end: called when the result is written; it does not return, except in tests.
    """

    def __init__(
        self, ctx: Context, section: Autotuning, end: Callable[[], None] = end_process
    ) -> None:
        self.ctx = ctx
        self.section = section
        self._end = end
        self._host = CpuAccelerator()
        self._events: list[Any] = []
        self._steps = self._samples = 0
        self._flops: int | None = None
        self._counter: Any = None
        self._written = False
        self._began = datetime.now(timezone.utc)
        for accelerator in (ctx.accelerator, self._host):
            accelerator.reset_peak_memory_stats()
        if section.start_profile_step == 1:
            self._mark()

    def step_end(self) -> None:
        """A step is done: remember when, and count operations in the step after the last that is
        timed.

        Steps of this process are counted, from 1: the engine's go on where a checkpoint was loaded.
        """
        self._steps += 1
        done = self._steps
        samples = self.ctx.engine.global_samples
        first = self.section.start_profile_step
        last = self.section.end_profile_step
        if done == 1:
            self._samples = samples - self.ctx.batch.train  # those of before
        if first - 1 <= done <= last:
            self._mark()
            if done == first - 1:
                self._samples = samples
        if done == last:
            self._samples = samples - self._samples
            if self.section.metric == "flops":
                from torch.utils.flop_counter import FlopCounterMode

                self._counter = FlopCounterMode(display=False)
                self._counter.__enter__()
        elif self._counter is not None:
            self._counter.__exit__(None, None, None)
            self._flops = int(self._counter.get_total_flops())
            self._counter = None

    def request(self) -> Request | None:
        """Write the result and end the run, when the last step is measured.

        All ranks come here after the same step.
        """
        counts = self.section.metric == "flops"
        if not self._written and self._steps == self.section.end_profile_step + counts:
            self._write()
            self._leave()
        return None

    def failed(self, error: BaseException) -> None:
        """Write why it ended. Only this rank knows; the first one to write is believed."""
        path = self.section.metric_path
        if self._written or path is None or Path(path).exists():
            return
        self._written = True
        first = (str(error).strip().splitlines() or [""])[0][:LONGEST]
        text = scrub(f"{type(error).__name__}: {first}", frozenset(secrets_in(self.ctx.config.raw)))
        status = Status.OUT_OF_MEMORY if is_out_of_memory(error) else Status.CRASHED
        result = self._result(status, f"rank {self.ctx.rank}: {text}", {})
        with contextlib.suppress(OSError):  # the tuner says what it sees of the process
            write_json(Path(path), result.to_json())

    # -- what was measured -------------------------------------------------------------------------

    def _mark(self) -> None:
        """Remember the device's time; nothing waits for it, except at the begin and at the end of
        what is timed.
        """
        section = self.section
        accelerator = self.ctx.accelerator
        if len(self._events) in (0, section.end_profile_step - section.start_profile_step + 1):
            accelerator.synchronize()
        event = accelerator.new_event(timing=True)
        event.record()
        self._events.append(event)

    def _seconds(self) -> list[float]:
        self.ctx.accelerator.synchronize()
        pairs = zip(self._events, self._events[1:], strict=False)
        return [float(before.elapsed_time(after)) / 1e3 for before, after in pairs]

    def _write(self) -> None:
        """Bring together what ranks have measured; rank 0 writes it. Collective."""
        from ds_autotuning.trials.looking import LOOK

        self._written = True
        mine: dict[str, Any] = {"seconds": self._seconds(), "flops": self._flops, **self._peaks()}
        look = self.ctx.stash.get(LOOK)
        if look is not None:
            mine["model"] = look.finished().to_json()
        rows = comm.all_gather_json(mine)
        if self.ctx.rank != 0:
            return
        seconds = [max(each) for each in zip(*(row["seconds"] for row in rows), strict=True)]
        peaks = {name: max(row[name] for row in rows) for name in self._peaks()}
        flops = None if rows[0]["flops"] is None else sum(row["flops"] for row in rows) / len(rows)
        result = self._result(Status.DONE, "", peaks, seconds, flops)
        if look is not None and (path := profile_path(self.section)) is not None:
            from ds_autotuning.trials.profile import joined

            profile = joined([row["model"] for row in rows], self.ctx.batch.micro, result)
            write_json(path, profile.to_json())
        if self.section.metric_path is not None:  # last: who sees it may kill this run
            write_json(Path(self.section.metric_path), result.to_json())

    def _peaks(self) -> dict[str, int]:
        host = self._host.max_memory_allocated()
        on_host = self.ctx.accelerator.device_type == "cpu"
        return {
            "peak_device": host if on_host else self.ctx.accelerator.max_memory_allocated(),
            "peak_host": host,
        }

    def _result(
        self,
        status: Status,
        reason: str,
        peaks: Mapping[str, int],
        seconds: list[float] | None = None,
        flops: float | None = None,
    ) -> Result:
        timed = seconds or []
        latency = statistics.median(timed) if timed else None
        return Result(
            status=status,
            reason=reason,
            throughput=self._samples / len(timed) / latency if latency else None,
            latency=latency,
            flops=flops / latency if latency and flops is not None else None,
            seconds=tuple(timed),
            peak_device=peaks.get("peak_device"),
            peak_host=peaks.get("peak_host"),
            started=self._began.isoformat(timespec="seconds"),
            took=(datetime.now(timezone.utc) - self._began).total_seconds(),
        )

    def _leave(self) -> None:
        engine = self.ctx.engine
        # the result is written; what is left may not keep the trial from ending
        with contextlib.suppress(Exception):
            engine.close_checkpointer()
            engine.telemetry.close(None)
        comm.barrier()
        self._end()
