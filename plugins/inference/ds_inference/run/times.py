"""How long calls of a model take, whichever answers: the module, its graphs, or a program."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from ds_inference_kit.program import Runnable
from ds_inference_kit.step import KVCache, Step
from torch import Tensor, nn


class Stopwatch:
    """Measures calls from `start` on.

    A call inside another is part of it, and not measured by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # None: nothing is measured.
        self._times: list[float] | None = None
        self._depth = 0
        # Starts a measurement; the function that it returns ends it.
        self._clock: Callable[[], Callable[[], float]] = _host_clock
        self._ended: Callable[[], float] = lambda: 0.0
        self._hooks: list[Any] = []

    def start(self, module: nn.Module, events: bool) -> None:
        """Measure each call of `module`, and each `call`.

        events: by events of the device, where it has them.
        """
        if self._times is not None:
            return
        self._times = []
        self._depth = 0
        if self._device.type == "cuda":
            self._clock = _event_clock if events else lambda: _host_clock(self._device)
        before = module.register_forward_pre_hook(lambda *_: self._begin())
        # of calls that fail, too
        after = module.register_forward_hook(lambda *_: self._end(), always_call=True)
        self._hooks = [before, after]

    def stop(self) -> None:
        """Measure no more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._times = None

    def take(self) -> list[float] | None:
        """Milliseconds of each call since this was asked last; None: nothing is measured."""
        times = self._times
        if times is not None:
            self._times = []
        return times

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A call of the model."""
        if self._times is None:
            yield
            return
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self) -> None:
        if self._depth == 0:
            self._ended = self._clock()
        self._depth += 1

    def _end(self) -> None:
        self._depth -= 1
        if self._depth == 0 and self._times is not None:
            self._times.append(self._ended())


class Timed:
    """A runnable whose steps are calls that `watch` measures."""

    def __init__(self, runnable: Runnable, watch: Stopwatch) -> None:
        self._runnable = runnable
        self._watch = watch

    def __call__(self, step: Step, cache: KVCache | None = None) -> Tensor:
        """See `Runnable`."""
        with self._watch.call():
            return self._runnable(step, cache)

    def rebind(self) -> None:
        """See `Runnable`."""
        self._runnable.rebind()


def _event_clock() -> Callable[[], float]:
    """Begins to measure on the device; what it gives ends that, and says how many milliseconds went
    by.
    """
    first = torch.cuda.Event(enable_timing=True)
    last = torch.cuda.Event(enable_timing=True)
    first.record()

    def elapsed() -> float:
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last))

    return elapsed


def _host_clock(device: torch.device | None = None) -> Callable[[], float]:
    """As `_event_clock`, by the host's clock.

    device: one whose work is waited for.
    """
    if device is not None:
        torch.cuda.synchronize(device)
    first = time.perf_counter()

    def elapsed() -> float:
        if device is not None:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - first) * 1e3

    return elapsed
