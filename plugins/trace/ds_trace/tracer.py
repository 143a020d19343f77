"""`Tracer`: torch.profiler on the chosen steps of one engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import profiler

from ds_core import comm
from ds_trace.collectives import NamedCollectives
from ds_trace.config import TorchProfiler
from ds_trace.names import PHASE

if TYPE_CHECKING:
    from ds_core.context import Context

log = logging.getLogger("ds_core.trace")


def make_tracer(ctx: Context) -> Tracer | None:
    """The tracer of a run; None where ``torch_profiler`` is off."""
    section = ctx.config.section(TorchProfiler)
    return Tracer(ctx, section) if section is not None and section.enabled else None


class Tracer:
    """Starts the profiler before the first traced step, tells it of steps, and writes this rank's
    file.

    Ranks that are not traced count along: they take out the interceptor at the same step as all
    others.
    """

    def __init__(self, ctx: Context, section: TorchProfiler) -> None:
        self._rank = ctx.rank
        self._world = ctx.world_size
        self._section = section
        self._device = ctx.accelerator.device_type
        self._traces = section.ranks is None or ctx.rank in section.ranks
        self._profiler: Any = None
        self._ranges: list[Any] = []
        self._step = 0

    def announce(self) -> None:
        """Log which steps will be traced, and where the files go."""
        from ds_core.process import show_log

        show_log()
        first = self._section.wait + self._section.warmup + 1
        last = first + self._section.record - 1
        log.info("steps %d to %d from now are traced into %s", first, last, self._section.folder)
        if beyond := [rank for rank in self._section.ranks or () if rank >= self._world]:
            log.warning(
                "torch_profiler.ranks: there is no rank %d; there are %d ranks",
                beyond[0],
                self._world,
            )

    # -- events ------------------------------------------------------------------------------------

    def phase_begin(self, phase: str) -> None:
        """See `ds_phase_begin`."""
        if self._profiler is None:
            # The profiler costs time even while it records nothing, so it starts as late as it can.
            if self._step < self._section.wait or not self._traces:
                return
            self._start()
        entered = profiler.record_function(f"{PHASE}{phase}")
        entered.__enter__()
        self._ranges.append(entered)

    def phase_end(self) -> None:
        """See `ds_phase_end`."""
        if self._ranges:
            self._ranges.pop().__exit__(None, None, None)

    def step_end(self) -> bool:
        """See `ds_step_end`; returns whether this was the last step that is traced."""
        self._step += 1
        if self._profiler is not None:
            # The metadata must be there before `step`, which may write the file.
            self._describe()
            self._profiler.step()
            self._mark()
        return self._step >= self._section.wait + self._section.warmup + self._section.record

    def stop(self) -> None:
        """Nothing more is traced; what was recorded is written."""
        if self._profiler is not None:
            running, self._profiler = self._profiler, None
            while self._ranges:
                self.phase_end()
            running.stop()
        for interceptor in _interceptors():
            comm.remove_interceptor(interceptor)

    # -- the profiler ------------------------------------------------------------------------------

    def _start(self) -> None:
        section = self._section
        folder = Path(section.folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._profiler = profiler.profile(
            schedule=profiler.schedule(
                wait=0, warmup=section.warmup, active=section.record, repeat=1
            ),
            on_trace_ready=self._writer(folder),
            record_shapes=section.shapes,
            profile_memory=section.memory,
            with_stack=section.stack,
        )
        self._profiler.start()
        self._mark()

    def _mark(self) -> None:
        """Name collectives while steps are recorded."""
        step = self._step - self._section.wait
        recording = self._section.warmup <= step < self._section.warmup + self._section.record
        for interceptor in _interceptors():
            interceptor.recording = recording
        self._describe()

    def _describe(self) -> None:
        """Say in the file whose it is, and how many whole steps it holds."""
        steps = self._step - self._section.wait - self._section.warmup
        if steps >= 0:
            about = {
                "rank": self._rank,
                "world": self._world,
                "device": self._device,
                "steps": steps,
            }
            self._profiler.add_metadata_json("ds_core", json.dumps(about))

    def _writer(self, folder: Path) -> Callable[[Any], None]:
        path = folder / f"rank{self._rank}.json.gz"
        rank = self._rank

        def write(recorded: Any) -> None:
            recorded.export_chrome_trace(str(path))
            log.log(logging.INFO if rank == 0 else logging.DEBUG, "trace written: %s", path)

        return write


def _interceptors() -> list[NamedCollectives]:
    return [i for i in comm.interceptors() if isinstance(i, NamedCollectives)]
