"""Accelerators: what the core and its plugins ask of a device type, and which one a process uses
(torch-free).

One is selected by `DS_ACCELERATOR`, else by probing plugins' first, then the core's, then cpu. The
selection is process-wide; ``ds_core.reset()`` and `reset_accelerator` clear it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ds_core import names_on_first_use
from ds_core.entries import AcceleratorEntry, ask, resolve
from ds_core.errors import AcceleratorError, PluginError, did_you_mean
from ds_core.plugins import BACKENDS, BUILTIN, Answer, Plugins, PluginState, blaming

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ds_core.accelerator.cpu import CpuAccelerator as CpuAccelerator
    from ds_core.accelerator.generic import TorchAccelerator as TorchAccelerator

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {"cpu": "CpuAccelerator", "generic": "TorchAccelerator"},
)

VARIABLE = "DS_ACCELERATOR"

log = logging.getLogger("ds_core.accelerator")


class HostEvent:
    """An event of a device that has none.

    `record` waits for the device's queued work by calling `drain`.
    """

    def __init__(self, drain: Callable[[], None]) -> None:
        self._drain = drain

    def record(self) -> None:
        """Wait for all queued work."""
        self._drain()
        self._time = time.perf_counter()

    def wait(self) -> None:
        """Does nothing: the work was done when `record` returned."""

    synchronize = wait

    def query(self) -> bool:
        """True: the work was done when `record` returned."""
        return True

    def elapsed_time(self, later: HostEvent) -> float:
        """Milliseconds from here to `later`."""
        return (later._time - self._time) * 1e3


class Accelerator(ABC):
    """One device type. The constructor and `device_count` must not initialize a device.

    name: the value of ``DS_ACCELERATOR`` that selects it, as in its AcceleratorEntry.
    device_type: torch's name of the device type.

    Memory is in bytes, and of the current device. The methods that are not abstract are right for a
    device with one stream and without pinned memory.
    """

    name: str
    device_type: str

    @property
    @abstractmethod
    def communication_backend(self) -> str:
        """The torch.distributed backend for its tensors. May be a class attribute."""

    # -- devices -----------------------------------------------------------------------------------

    @abstractmethod
    def device_count(self) -> int:
        """Number of devices that this process can see."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Make device `index` the current one.

        Raises AcceleratorError, with `device_count`, if it does not exist.
        """

    @abstractmethod
    def current_index(self) -> int:
        """Index of the current device."""

    def device(self, index: int | None = None) -> torch.device:
        """``torch.device`` of device `index`, or of the current one."""
        import torch

        return torch.device(self.device_type, self.current_index() if index is None else index)

    def current_device(self) -> torch.device:
        """The device of this rank's tensors."""
        return self.device()

    def local_index(self, local_rank: int) -> int:
        """The device index for a process: its local rank modulo `device_count`, so that processes
        can share devices.
        """
        return local_rank % max(1, self.device_count())

    # -- streams and events ------------------------------------------------------------------------

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""

    def new_stream(self) -> Any:
        """A new stream with ``wait_stream(other)``. None: the device has only one."""
        return None

    def current_stream(self) -> Any:
        """The current stream. None: the device has only one."""
        return None

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Context manager: work is queued on `stream`. None: no effect."""
        return contextlib.nullcontext()

    def new_event(self, timing: bool = False) -> Any:
        """An event: record(), wait() (on this stream), synchronize(), query(); if timing:
        elapsed_time(later).
        """
        return HostEvent(self.synchronize)

    # -- memory ------------------------------------------------------------------------------------

    @abstractmethod
    def memory_allocated(self) -> int:
        """Bytes of live tensors."""

    @abstractmethod
    def max_memory_allocated(self) -> int:
        """Peak of `memory_allocated` since `reset_peak_memory_stats`."""

    @abstractmethod
    def reset_peak_memory_stats(self) -> None:
        """Reset the peak of `max_memory_allocated`."""

    @abstractmethod
    def total_memory(self) -> int:
        """Bytes of the device's memory."""

    def available_memory(self) -> int:
        """Bytes that can still be allocated."""
        return max(0, self.total_memory() - self.memory_allocated())

    def empty_cache(self) -> None:
        """Free the allocator's cached memory."""
        return

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy of a CPU tensor in pinned memory; the tensor itself if the device has no use for
        pinned memory.
        """
        return tensor

    # -- random numbers and dtypes -----------------------------------------------------------------

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generators of all devices of this type."""

    @abstractmethod
    def get_rng_state(self) -> Tensor:
        """State of the current device's generator: a 1-d uint8 tensor on the CPU."""

    @abstractmethod
    def set_rng_state(self, state: Tensor) -> None:
        """Restore a state from `get_rng_state`."""

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """Whether the device computes in floating-point `dtype` natively, without emulation."""

    def autocast(
        self, dtype: torch.dtype, enabled: bool = True
    ) -> contextlib.AbstractContextManager[Any]:
        """``torch.autocast`` to `dtype` on this device type."""
        import torch

        return torch.autocast(self.device_type, dtype=dtype, enabled=enabled)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


# -- selection -------------------------------------------------------------------------------------


_choice: tuple[Accelerator, bool] | None = None  # and whether it comes from set_accelerator


def get_accelerator(plugins: Plugins | None = None) -> Accelerator:
    """This process's accelerator: from `set_accelerator`, else selected earlier, else selected now.

    plugins: select again from these (a run's plugins may bring devices), unless `set_accelerator`
    was called.
    """
    global _choice
    if _choice is None or (plugins is not None and not _choice[1]):
        _choice = select_accelerator(plugins or Plugins()), False
    return _choice[0]


def set_accelerator(accelerator: Accelerator) -> None:
    """Use `accelerator` in this process from now on, instead of `DS_ACCELERATOR` and probing."""
    global _choice
    if not isinstance(accelerator, Accelerator):
        raise AcceleratorError(
            f"{accelerator!r} is not an Accelerator; subclass ds_core.accelerator.Accelerator and "
            "pass an instance"
        )
    _choice = accelerator, True


def reset_accelerator() -> None:
    """Clear the selection; the next `get_accelerator` selects again."""
    global _choice
    _choice = None


def candidates(plugins: Plugins) -> list[tuple[AcceleratorEntry, str, str | None]]:
    """Every registered accelerator in order of preference: (entry, distribution, None or why it is
    unavailable).
    """
    return [(row.value, row.plugin.dist, ask(row.value.probe)) for row in _rows(plugins)]


def select_accelerator(plugins: Plugins) -> Accelerator:
    """Select and load the accelerator; initializes no device.

    Raises AcceleratorError if `DS_ACCELERATOR` names none, a broken or an unavailable one (the
    message lists what is installed and why it is unavailable), or if two plugins' are available
    with equal priority; PluginError if loading fails.
    """
    named = os.environ.get(VARIABLE, "").strip()
    row = _named(named, plugins) if named else _probed(_rows(plugins))
    plugins.join(row.plugin)
    try:
        with blaming(
            row.plugin, f"failed to make the accelerator {row.value.name} ({row.value.load})"
        ):
            made = resolve(row.value.load)()
            if not isinstance(made, Accelerator):
                raise TypeError(f"it gave a {type(made).__name__}, not an Accelerator")
    except PluginError as error:
        fix = f"set {VARIABLE}=cpu to run without it, or name {row.plugin.dist} in plugins.disable"
        raise PluginError(f"{error}; {fix}") from error.__cause__
    return made


def _rows(plugins: Plugins) -> list[Answer]:
    """One answer per entry, in order of preference: plugins' first, then by priority and name; cpu
    is last.
    """
    rows = [
        Answer(answer.plugin, entry)
        for answer in plugins.offers("ds_accelerators")
        for entry in answer.value
    ]
    return sorted(
        rows, key=lambda r: (not _outside(r), -r.value.priority, r.value.name, r.plugin.dist)
    )


def _outside(row: Answer) -> bool:
    return row.plugin.module != BUILTIN


def _shown(row: Answer) -> str:
    return f"{row.value.name} ({row.plugin.dist})"


def _probed(rows: list[Answer]) -> Answer:
    # Plugins' first: a vendor's package may serve a device type that the core drives generically.
    usable = [row for row in rows if _outside(row) and ask(row.value.probe) is None]
    if len(usable) > 1 and usable[0].value.priority == usable[1].value.priority:
        names = sorted({row.value.name for row in usable[:2]})
        fix = f"set {VARIABLE} to {' or '.join(names)}" if len(names) > 1 else "uninstall one"
        both = " and ".join(map(_shown, usable[:2]))
        raise AcceleratorError(
            f"{both} are both available with priority {usable[0].value.priority}; {fix}"
        )
    # The core's are probed only if no plugin's is usable; cpu has no probe and ends the search.
    chosen = (
        usable[0]
        if usable
        else next(r for r in rows if not _outside(r) and ask(r.value.probe) is None)
    )
    log.debug("accelerator %s, by probing", _shown(chosen))
    return chosen


def _named(named: str, plugins: Plugins) -> Answer:
    import torch

    rows = _rows(plugins)
    wanted = named.lower()
    for report in plugins.reports():
        found = report.found
        if report.state is PluginState.QUARANTINED and (found.group, found.name.lower()) == (
            BACKENDS,
            wanted,
        ):
            raise AcceleratorError(
                f"{VARIABLE}={named}: {report.why}; fix or uninstall {found.dist}"
            )
    matching = [row for row in rows if row.value.name.lower() == wanted]
    # a device that is registered with torch
    if not matching and wanted == torch._C._get_privateuse1_backend_name():
        matching = [row for row in rows if row.value.name == "privateuse1"]
    if len(outside := [row.plugin.dist for row in matching if _outside(row)]) > 1:
        raise AcceleratorError(
            f"{VARIABLE}={named} is offered by {outside[0]} and {outside[1]}; uninstall one, "
            f"or name it in plugins.disable"
        )
    if matching and (reason := ask(matching[0].value.probe)) is None:
        return matching[0]
    if matching:
        what = f"{VARIABLE}={named}: {_shown(matching[0])} is not available: {reason}."
    else:
        fix = did_you_mean(named, [row.value.name for row in rows], "choose one of these.")
        what = f"{VARIABLE}={named} names no installed accelerator; {fix}"
    installed = "; ".join(f"{_shown(row)}: {ask(row.value.probe) or 'available'}" for row in rows)
    raise AcceleratorError(f"{what} Installed: {installed}{plugins.quarantined()}")
