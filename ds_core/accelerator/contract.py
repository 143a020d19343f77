"""The accelerator contract: everything the core and its plugins ask of a device kind (torch-free at import).

[Note: wide on purpose] A thin contract ends in back ends that patch their way around it. So whatever the project
asks of a device stands here, with a default wherever all devices agree; a new back end overrides what differs.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Accelerator", "BuildFlags"]


@dataclass(frozen=True, slots=True)
class BuildFlags:
    """How kernels are compiled for this device: compiler flags, linker flags, and the architectures aimed at."""

    cxx: tuple[str, ...] = ()
    device: tuple[str, ...] = ()
    link: tuple[str, ...] = ()
    architectures: tuple[str, ...] = ()


class Accelerator(ABC):
    """One device kind. Making one must not initialise a device.

    name: what ``DS_ACCELERATOR`` calls it. device_type: torch's name (``torch.device(device_type)``).
    communication_backend: the torch.distributed backend for its tensors. visible_devices_env: the variable that
    hides devices, "" if there is none. kernel_tags: kernel providers it can run, best first.
    """

    name: str
    device_type: str
    communication_backend: str
    visible_devices_env: str = ""
    kernel_tags: tuple[str, ...] = ("cpp", "reference")
    supports_graphs: bool = False

    # -- devices ---------------------------------------------------------------------------------------------

    @abstractmethod
    def is_available(self) -> bool:
        """Whether at least one device can be used; must not initialise it."""

    @abstractmethod
    def device_count(self) -> int:
        """Devices that this process can see."""

    @abstractmethod
    def set_device(self, index: int) -> None:
        """Make device `index` the current one."""

    @abstractmethod
    def current_index(self) -> int:
        """Index of the current device."""

    @abstractmethod
    def device_name(self, index: int | None = None) -> str:
        """The hardware's name."""

    def device(self, index: int | None = None) -> torch.device:
        """``torch.device`` number `index`; the current one for None."""
        import torch

        return torch.device(self.device_type, self.current_index() if index is None else index)

    def current_device(self) -> torch.device:
        """The device where this rank's tensors live."""
        return self.device()

    def local_index(self) -> int:
        """The device of this rank among those on its host: LOCAL_RANK, modulo the devices that are visible."""
        return int(os.environ.get("LOCAL_RANK", "0")) % max(1, self.device_count())

    def on_device(self, tensor: Tensor) -> bool:
        """Whether `tensor` lives on this kind of device."""
        return tensor.device.type == self.device_type

    # -- order of work ---------------------------------------------------------------------------------------

    @abstractmethod
    def synchronize(self, index: int | None = None) -> None:
        """Wait until the device has done all that was asked of it."""

    @abstractmethod
    def new_stream(self, priority: int = 0) -> Any:
        """A new queue of work; None on devices that have only one."""

    @abstractmethod
    def current_stream(self) -> Any:
        """The queue that new work goes to; None on devices that have only one."""

    @abstractmethod
    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Inside, work goes to `stream`; None changes nothing."""

    @abstractmethod
    def new_event(self, timing: bool = False) -> Any:
        """An event with ``record(stream)``, ``wait(stream)``, ``synchronize()``, ``query()`` and "
        "``elapsed_time(end)``."""

    # -- memory, in bytes ------------------------------------------------------------------------------------

    @abstractmethod
    def memory_allocated(self, index: int | None = None) -> int:
        """Bytes that live tensors take."""

    @abstractmethod
    def max_memory_allocated(self, index: int | None = None) -> int:
        """The most that `memory_allocated` was since `reset_peak_memory_stats`."""

    @abstractmethod
    def reset_peak_memory_stats(self, index: int | None = None) -> None:
        """Start a new peak."""

    @abstractmethod
    def memory_reserved(self, index: int | None = None) -> int:
        """Bytes that the allocator holds, in use or not."""

    @abstractmethod
    def total_memory(self, index: int | None = None) -> int:
        """Bytes of the device."""

    @abstractmethod
    def available_memory(self, index: int | None = None) -> int:
        """Bytes that could still be taken."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give unused memory back to the device."""

    def pin(self, tensor: Tensor) -> Tensor:
        """A page-locked copy of a host tensor, for asynchronous copies; the tensor itself where that means nothing."""
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether copies of `tensor` to the device can be asynchronous."""
        return False

    # -- random numbers --------------------------------------------------------------------------------------

    @abstractmethod
    def manual_seed(self, seed: int) -> None:
        """Seed the generators of all devices of this kind."""

    @abstractmethod
    def get_rng_state(self, index: int | None = None) -> Tensor:
        """State of a device's generator, a uint8 CPU tensor."""

    @abstractmethod
    def set_rng_state(self, state: Tensor, index: int | None = None) -> None:
        """Restore what `get_rng_state` gave."""

    # -- dtypes ----------------------------------------------------------------------------------------------

    @abstractmethod
    def supports(self, dtype: torch.dtype) -> bool:
        """Whether the device computes in `dtype`."""

    def preferred_dtype(self) -> torch.dtype:
        """The fastest training dtype: bf16, else fp16, else fp32."""
        import torch

        return next(d for d in (torch.bfloat16, torch.float16, torch.float32) if self.supports(d))

    def autocast(self, dtype: torch.dtype, enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
        """Mixed-precision context for this device."""
        import torch

        return torch.autocast(self.device_type, dtype=dtype, enabled=enabled)

    # -- kernels ---------------------------------------------------------------------------------------------

    def build_flags(self) -> BuildFlags:
        """How to compile kernels for this device."""
        return BuildFlags(cxx=("-O3", "-std=c++17"))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"
