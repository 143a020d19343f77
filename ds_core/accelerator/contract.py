"""The accelerator contract: what the core and its plugins ask of a device type (torch-free at import).

Thirteen methods are abstract. The defaults of the others are right for a device with one stream, without graphs and
without pinned memory.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ds_core.errors import AcceleratorError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Accelerator", "HostEvent"]


class HostEvent:
    """An event on the host's clock, for devices that have no events.

    drain: synchronizes the device; `record` calls it, so that the time is when work was done, not when it was queued.
    """

    def __init__(self, drain: Callable[[], None] | None = None) -> None:
        self._drain = drain
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        """Wait for all queued work, then read the clock."""
        if self._drain is not None:
            self._drain()
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Does nothing: the work was done when `record` returned."""

    def synchronize(self) -> None:
        """Does nothing: the work was done when `record` returned."""

    def query(self) -> bool:
        """True: the work was done when `record` returned."""
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this event to `end`."""
        return (end._time - self._time) * 1e3


class Accelerator(ABC):
    """One device type. The constructor, `is_available` and `device_count` must not initialize a device.

    name: the value of ``DS_ACCELERATOR`` that selects it, as in its AcceleratorEntry. device_type: torch's name of the
    device type. visible_devices_env: the environment variable that hides devices from a process, "" if there is none.
    Memory is in bytes. ``index=None`` means the current device.
    """

    name: str
    device_type: str
    visible_devices_env: str = ""

    @property
    @abstractmethod
    def communication_backend(self) -> str:
        """The torch.distributed backend for its tensors. May be a class attribute."""

    # -- devices ---------------------------------------------------------------------------------------------

    @abstractmethod
    def device_count(self) -> int:
        """Number of devices that this process can see."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Make device `index` the current one. Raises AcceleratorError, with `device_count`, if it does not exist."""

    @abstractmethod
    def current_index(self) -> int:
        """Index of the current device."""

    def is_available(self) -> bool:
        """Whether there is at least one usable device."""
        return self.device_count() > 0

    def device_name(self, index: int | None = None) -> str:
        """torch's device string: ``"cuda"``, or with an index ``"cuda:1"``."""
        return self.device_type if index is None else str(self.device(index))

    def device(self, index: int | None = None) -> torch.device:
        """``torch.device`` of device `index`."""
        import torch

        return torch.device(self.device_type, self.current_index() if index is None else index)

    def current_device(self) -> torch.device:
        """The device of this rank's tensors."""
        return self.device()

    def local_index(self) -> int:
        """The device index for this process: LOCAL_RANK modulo `device_count`, so that processes can share devices."""
        text = os.environ.get("LOCAL_RANK", "0")
        if not text.isdecimal():
            raise AcceleratorError(f"LOCAL_RANK is {text!r}; it must be an integer >= 0, as launchers set it")
        return int(text) % max(1, self.device_count())

    def on_device(self, tensor: Tensor) -> bool:
        """Whether `tensor` is on a device of this type."""
        return tensor.device.type == self.device_type

    # -- streams, events, graphs -----------------------------------------------------------------------------

    @abstractmethod
    def synchronize(self, index: int | None = None) -> None:
        """Wait until the device has finished all queued work."""

    def new_stream(self, priority: int = 0) -> Any:
        """A new stream (lower `priority` runs first) with ``wait_stream(other)``. None: the device has only one."""
        return None

    def current_stream(self) -> Any:
        """The current stream. None: the device has only one."""
        return None

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Context manager: work is queued on `stream`. None: no effect."""
        return contextlib.nullcontext()

    def new_event(self, timing: bool = False) -> Any:
        """An event with ``record()``, ``wait()`` (both on the current stream), ``synchronize()`` and ``query()``.

        timing: it also has ``elapsed_time(end)``, in milliseconds.
        """
        return HostEvent(self.synchronize)

    @property
    def supports_graphs(self) -> bool:
        """Whether `new_graph` and `capture` work."""
        return False

    def new_graph(self) -> Any:
        """An empty graph; after `capture` it has ``replay()`` and ``reset()``."""
        raise AcceleratorError(f"{self.name} cannot capture graphs; ask supports_graphs first")

    def capture(self, graph: Any) -> contextlib.AbstractContextManager[Any]:
        """Context manager: work is recorded into `graph`, not executed."""
        raise AcceleratorError(f"{self.name} cannot capture graphs; ask supports_graphs first")

    # -- memory, in bytes ------------------------------------------------------------------------------------

    @abstractmethod
    def memory_allocated(self, index: int | None = None) -> int:
        """Bytes of live tensors."""

    @abstractmethod
    def max_memory_allocated(self, index: int | None = None) -> int:
        """Peak of `memory_allocated` since `reset_peak_memory_stats`."""

    @abstractmethod
    def reset_peak_memory_stats(self, index: int | None = None) -> None:
        """Reset the peak of `max_memory_allocated`."""

    @abstractmethod
    def total_memory(self, index: int | None = None) -> int:
        """Bytes of the device's memory."""

    def memory_reserved(self, index: int | None = None) -> int:
        """Bytes that the allocator holds, in use or cached."""
        return self.memory_allocated(index)

    def available_memory(self, index: int | None = None) -> int:
        """Bytes that can still be allocated."""
        return max(0, self.total_memory(index) - self.memory_reserved(index))

    def empty_cache(self) -> None:
        """Free the allocator's cached memory."""
        return

    def pin(self, tensor: Tensor) -> Tensor:
        """A copy of a CPU tensor in pinned memory; the tensor itself if the device has no use for pinned memory."""
        return tensor

    # -- random numbers --------------------------------------------------------------------------------------

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generators of all devices of this type."""

    @abstractmethod
    def get_rng_state(self, index: int | None = None) -> Tensor:
        """State of a device's generator: a 1-d uint8 tensor on the CPU."""

    @abstractmethod
    def set_rng_state(self, state: Tensor, index: int | None = None) -> None:
        """Restore a state from `get_rng_state`."""

    # -- dtypes ----------------------------------------------------------------------------------------------

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """Whether the device computes in floating-point `dtype` natively, without emulation."""

    def autocast(self, dtype: torch.dtype, enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
        """``torch.autocast`` to `dtype` on this device type."""
        import torch

        return torch.autocast(self.device_type, dtype=dtype, enabled=enabled)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"
