"""A progress bar over optimizer steps: live on a terminal, plain lines elsewhere; only rank 0 shows
anything.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from torch import Tensor

    from ds_core.engine import RunningEngine


PLAIN_EVERY_SECONDS = 5.0


class Bar:
    """What `progress` yields: call `update` after each optimizer step."""

    def __init__(self, engine: RunningEngine, total: int, live: Progress | None) -> None:
        self._engine = engine
        self._total = total
        self._live = live
        self._start = time.monotonic()
        self._first = engine.global_samples
        self._said = self._start
        self._task: TaskID | None = None
        if live is not None:
            self._task = live.add_task("", total=total, completed=engine.global_steps, facts="")

    def update(self, loss: Tensor | float) -> None:
        """Show the step just done with its `loss` (0-d tensor or number), samples/s and memory."""
        if self._engine.global_rank != 0:
            return
        now = time.monotonic()
        last = self._engine.global_steps >= self._total
        if self._live is None and now - self._said < PLAIN_EVERY_SECONDS and not last:
            return
        self._said = now
        rate = (self._engine.global_samples - self._first) / max(now - self._start, 1e-9)
        memory = self._engine.ctx.accelerator.memory_allocated() / 2**20
        value = loss if isinstance(loss, float) else loss.item()
        facts = f"loss {value:.3f}  {rate:.0f} samples/s  {memory:.0f} MiB"
        if self._live is None or self._task is None:
            print(f"step {self._engine.global_steps}/{self._total}  {facts}", flush=True)
        else:
            self._live.update(self._task, completed=self._engine.global_steps, facts=facts)


@contextlib.contextmanager
def progress(engine: RunningEngine, total: int) -> Iterator[Bar]:
    """A `Bar` that counts `engine.global_steps` up to `total`."""
    if engine.global_rank != 0 or not sys.stdout.isatty():
        yield Bar(engine, total, None)
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as live:
        yield Bar(engine, total, live)
