"""Memory of the device and of the host: per phase, and one line at any time
(`see_memory_usage`)."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ds_core.accelerator import get_accelerator
from ds_core.accelerator.cpu import CpuAccelerator

if TYPE_CHECKING:
    from ds_core.accelerator import Accelerator

log = logging.getLogger("ds_core.engine")
GIB = 2.0**30


@dataclass(slots=True)
class Used:
    """Bytes of a phase: in use when it ended last, the most while it ran, and of the host's memory
    at its end.
    """

    in_use: int = 0
    peak: int = 0
    host: int = 0


class PhaseMemory:
    """Memory per phase of one step.

    The device's peak counter is read and reset at each begin and end of a phase.

    highest: the most of the whole run. Nothing waits for the device: memory is counted when work is
    queued.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._host = None if accelerator.device_type == "cpu" else CpuAccelerator()
        self._open: list[int] = []
        self._phases: dict[str, Used] = {}
        self.highest = 0

    def _look(self) -> None:
        """The peak since the last look is that of all open phases."""
        peak = self._accelerator.max_memory_allocated()
        self._accelerator.reset_peak_memory_stats()
        self._open = [max(peak, other) for other in self._open]
        self.highest = max(self.highest, peak)

    def begin(self) -> None:
        """A phase begins, perhaps inside another."""
        self._look()
        self._open.append(0)

    def end(self, phase: str) -> None:
        """The innermost phase ends."""
        self._look()
        if not self._open:
            return
        used = self._phases.setdefault(phase, Used())
        used.peak = max(used.peak, self._open.pop())
        used.in_use = self._accelerator.memory_allocated()
        used.host = 0 if self._host is None else self._host.memory_allocated()

    def end_step(self) -> dict[str, Used]:
        """What was seen in the step that ends here."""
        done, self._phases = self._phases, {}
        return done


def memory_line(message: str, accelerator: Accelerator) -> str:
    """One line: the device's memory in use, at peak and free, and the host's in use by this
    process.
    """
    used = accelerator.memory_allocated() / GIB
    peak = accelerator.max_memory_allocated() / GIB
    line = (
        f"{message}: {used:.2f} GiB in use, {peak:.2f} GiB at peak, "
        f"{accelerator.available_memory() / GIB:.2f} GiB free"
    )
    if accelerator.device_type == "cpu":
        return line
    host = CpuAccelerator()
    return (
        f"{line}; host: {host.memory_allocated() / GIB:.2f} GiB in use, "
        f"{host.max_memory_allocated() / GIB:.2f} GiB at "
        f"peak, {host.available_memory() / GIB:.2f} GiB free"
    )


def see_memory_usage(message: str, *, all_ranks: bool = False, reset_peak: bool = False) -> None:
    """Log memory in use, at peak and free (`memory_line`), on rank 0 or all ranks; reset_peak: then
    forget the peak.
    """
    from ds_core import comm
    from ds_core.process import show_log

    accelerator = get_accelerator()
    if all_ranks or comm.rank() == 0:
        show_log()
        who = f"rank {comm.rank()}: {message}" if all_ranks else message
        log.info(memory_line(who, accelerator))
    if reset_peak:
        accelerator.reset_peak_memory_stats()
