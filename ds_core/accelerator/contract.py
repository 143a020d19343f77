"""The accelerator contract: everything the core and its plugins ask of a device kind (torch-free at import).

[Note: wide on purpose] A thin contract ends in back ends that patch their way around it. So whatever the project
asks of a device stands here, and twelve methods have no default. The rest answer as a device with one queue of work,
no graphs and no page-locked memory would; a back end overrides where its device can do better.
"""

from __future__ import annotations

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_core.errors import AcceleratorError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Accelerator", "BuildFlags", "HostEvent"]


@dataclass(frozen=True, slots=True)
class BuildFlags:
    """How kernels are compiled for this device, beyond what ``torch.utils.cpp_extension`` adds by itself.

    cxx, device, link: flags of the host compiler, the device compiler and the linker.
    architectures: what is aimed at (``"9.0"``, ``"gfx942"``, ``"x86_64"``); empty leaves it to the compiler.
    """

    cxx: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()


class HostEvent:
    """An event read off the host's clock, for devices without events of their own.

    drain: waits for the device; called on `record`, so that the time is when the work was done, not when it was asked.
    """

    def __init__(self, drain: Callable[[], None] | None = None) -> None:
        self._drain = drain
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        """Wait for the work so far and note the time."""
        if self._drain is not None:
            self._drain()
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """The work was done when `record` returned."""

    def synchronize(self) -> None:
        """The work was done when `record` returned."""

    def query(self) -> bool:
        """Always true, since `record` waits."""
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds until `end`."""
        return (end._time - self._time) * 1e3


class Accelerator(ABC):
    """One device kind. Making one must not initialise a device, and neither may `is_available` or `device_count`.

    name: what ``DS_ACCELERATOR`` calls it, as in its AcceleratorEntry. device_type: torch's name for its tensors.
    visible_devices_env: the variable that hides devices from a process, "" if there is none.
    kernel_tags: kernel providers that it can run, best first. Memory is in bytes; `index` None means the current
    device everywhere.
    """

    name: str
    device_type: str
    visible_devices_env: str = ""
    kernel_tags: tuple[str, ...] = ("cpp", "reference")

    @property
    @abstractmethod
    def communication_backend(self) -> str:
        """The torch.distributed backend for its tensors; a plain class attribute will do."""

    # -- devices ---------------------------------------------------------------------------------------------

    @abstractmethod
    def device_count(self) -> int:
        """Devices that this process can see."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Make device `index` the current one. Raises AcceleratorError, with the count, when there is none such."""

    @abstractmethod
    def current_index(self) -> int:
        """Index of the current device."""

    def is_available(self) -> bool:
        """Whether at least one device can be used."""
        return self.device_count() > 0

    def device_name(self, index: int | None = None) -> str:
        """The device as torch spells it: ``"cuda"``, or with an index ``"cuda:1"``; what ``tensor.to`` takes."""
        return self.device_type if index is None else f"{self.device_type}:{index}"

    def device(self, index: int | None = None) -> torch.device:
        """``torch.device`` number `index`."""
        import torch

        return torch.device(self.device_type, self.current_index() if index is None else index)

    def current_device(self) -> torch.device:
        """The device where this rank's tensors live."""
        return self.device()

    def local_index(self) -> int:
        """The device for this process among those of its host: LOCAL_RANK modulo `device_count`, so that more
        processes than devices share them."""
        text = os.environ.get("LOCAL_RANK", "0")
        if not text.isdecimal():
            raise AcceleratorError(f"LOCAL_RANK is {text!r}; it must be a whole number from 0, as a launcher sets it")
        return int(text) % max(1, self.device_count())

    def on_device(self, tensor: Tensor) -> bool:
        """Whether `tensor` lives on this kind of device."""
        return tensor.device.type == self.device_type

    # -- order of work ---------------------------------------------------------------------------------------

    @abstractmethod
    def synchronize(self, index: int | None = None) -> None:
        """Wait until the device has done all that was asked of it."""

    def new_stream(self, priority: int = 0) -> Any:
        """A new queue of work, lower `priority` first, with ``wait_stream(other)``; None where there is only one."""
        return None

    def current_stream(self) -> Any:
        """The queue that new work goes to; None where there is only one."""
        return None

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Inside, work goes to `stream`; None changes nothing."""
        return contextlib.nullcontext()

    def new_event(self, timing: bool = False) -> Any:
        """An event with ``record()`` and ``wait()`` on the current queue, ``synchronize()``, ``query()``, and with
        `timing` ``elapsed_time(end)`` in milliseconds."""
        return HostEvent(self.synchronize)

    @property
    def supports_graphs(self) -> bool:
        """Whether `new_graph` and `capture` work."""
        return False

    def new_graph(self) -> Any:
        """An empty graph, with ``replay()`` and ``reset()`` once it was captured."""
        raise AcceleratorError(f"{self.name} cannot capture graphs; ask supports_graphs first")

    def capture(self, graph: Any) -> contextlib.AbstractContextManager[Any]:
        """Inside, work is recorded into `graph` and not done."""
        raise AcceleratorError(f"{self.name} cannot capture graphs; ask supports_graphs first")

    # -- memory, in bytes ------------------------------------------------------------------------------------

    @abstractmethod
    def memory_allocated(self, index: int | None = None) -> int:
        """What live tensors take."""

    @abstractmethod
    def max_memory_allocated(self, index: int | None = None) -> int:
        """The most that `memory_allocated` was since `reset_peak_memory_stats`; never less than it is now."""

    @abstractmethod
    def reset_peak_memory_stats(self, index: int | None = None) -> None:
        """Start a new peak."""

    @abstractmethod
    def total_memory(self, index: int | None = None) -> int:
        """What the device has."""

    def memory_reserved(self, index: int | None = None) -> int:
        """What the allocator holds, in use or not."""
        return self.memory_allocated(index)

    def available_memory(self, index: int | None = None) -> int:
        """What could still be taken."""
        return max(0, self.total_memory(index) - self.memory_reserved(index))

    def empty_cache(self) -> None:
        """Give what the allocator holds unused back to the device."""
        return

    def pin(self, tensor: Tensor) -> Tensor:
        """A page-locked copy of a host tensor, for asynchronous copies; the tensor itself where that means nothing."""
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether `tensor` is page-locked."""
        return False

    # -- random numbers --------------------------------------------------------------------------------------

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generators of all devices of this kind."""

    @abstractmethod
    def get_rng_state(self, index: int | None = None) -> Tensor:
        """State of a device's generator: a one-dimensional uint8 tensor on the CPU."""

    @abstractmethod
    def set_rng_state(self, state: Tensor, index: int | None = None) -> None:
        """Restore what `get_rng_state` gave."""

    # -- dtypes ----------------------------------------------------------------------------------------------

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """Whether the device itself computes in floating-point `dtype`, without emulation."""

    def preferred_dtype(self) -> torch.dtype:
        """The fastest training dtype: bf16, else fp16, else fp32."""
        import torch

        return next((d for d in (torch.bfloat16, torch.float16) if self.supports(d)), torch.float32)

    def autocast(self, dtype: torch.dtype, enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
        """Mixed precision: inside, matrix products and the like compute in `dtype`."""
        import torch

        return torch.autocast(self.device_type, dtype=dtype, enabled=enabled)

    # -- kernels ---------------------------------------------------------------------------------------------

    def build_flags(self) -> BuildFlags:
        """How to compile kernels for this device."""
        return BuildFlags(cxx=("-O3",))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"
