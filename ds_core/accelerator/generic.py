"""One implementation for every device type of torch: cuda, xpu, mps and any PrivateUse1 device.

Each has a device module (``torch.cuda``, ``torch.xpu``, ``torch.<name>``) with similar functions. If a module lacks
one, ``torch.accelerator`` is used if it drives the device, else the default of the contract. Vendors whose device is
registered with torch subclass `TorchAccelerator` and override what differs.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ds_core.accelerator.contract import Accelerator
from ds_core.accelerator.cpu import CpuAccelerator
from ds_core.errors import AcceleratorError

__all__ = ["TorchAccelerator", "cuda", "mps", "privateuse1", "xpu"]

log = logging.getLogger("ds_core.accelerator")

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
_GRAPHS = ("CUDAGraph", "XPUGraph", "Graph")


class TorchAccelerator(Accelerator):
    """Drives the devices of ``torch.get_device_module(device_type)``.

    name: the value of ``DS_ACCELERATOR`` that selects it; default: the device type. module: replaces torch's module.
    Raises AcceleratorError if torch has no module for the device type.
    """

    def __init__(self, device_type: str, *, name: str = "", module: Any = None) -> None:
        self.device_type = device_type
        self.name = name or device_type
        try:
            self._module = torch.get_device_module(device_type) if module is None else module
        except RuntimeError as error:
            raise AcceleratorError(f"torch has no device module for {device_type!r}: {error}") from error
        self.visible_devices_env = _VISIBLE.get(device_type, "")
        self._warned = False

    @property
    def communication_backend(self) -> str:
        """torch.distributed's default backend for the device type; looked up late, since vendors register theirs."""
        backends = getattr(torch.distributed, "Backend", None)  # torch may be built without distributed
        return str(getattr(backends, "default_device_backend_map", {}).get(self.device_type, "gloo"))

    def _member(self, name: str) -> Callable[..., Any] | None:
        found = getattr(self._module, name, None)
        if found is None:
            current = torch.accelerator.current_accelerator()
            if current is not None and current.type == self.device_type:
                found = getattr(torch.accelerator, name, None) or getattr(torch.accelerator, f"{name}_index", None)
        return found if callable(found) else None

    def _first(self, *names: str) -> Callable[..., Any] | None:
        """The first of these functions that the device module has."""
        return next((found for name in names if (found := self._member(name)) is not None), None)

    def _call(self, names: str, *arguments: Any, default: Any = None) -> Any:
        """Call the first of these functions that the device module has; `default` if it has none."""
        member = self._first(*names.split())
        return default if member is None else member(*arguments)

    def _at(self, index: int | None) -> tuple[int, ...]:
        """The index as arguments; mps has one device and takes none."""
        return () if index is None or self.device_type == "mps" else (index,)

    # -- devices ---------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        member = self._member("is_available")
        return self.device_count() > 0 if member is None else bool(member())

    def device_count(self) -> int:
        return int(self._call("device_count", default=1))

    def set_device(self, index: int) -> None:
        count = self.device_count()
        if not 0 <= index < count:
            have = f"{count} device{'' if count == 1 else 's'}" + (f", numbers 0 to {count - 1}" if count > 1 else "")
            hidden = f"; {self.visible_devices_env} may hide some" if self.visible_devices_env else ""
            raise AcceleratorError(f"{self.name} has {have}; there is no number {index}{hidden}")
        if (member := self._member("set_device")) is not None:
            member(index)
        elif index != self.current_index():
            raise AcceleratorError(f"torch.{self.device_type} has no set_device; {self.name} cannot go to {index}")

    def current_index(self) -> int:
        return int(self._call("current_device", default=0))

    # -- streams, events, graphs -----------------------------------------------------------------------------

    def synchronize(self, index: int | None = None) -> None:
        self._call("synchronize", *self._at(index))

    def new_stream(self, priority: int = 0) -> Any:
        make = self._member("Stream")
        if make is None:
            return None
        return make(priority=priority) if priority else make()

    def current_stream(self) -> Any:
        return None if self._member("Stream") is None else self._call("current_stream")

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        if stream is None:
            return contextlib.nullcontext()
        member = self._member("stream")
        manager: contextlib.AbstractContextManager[Any] = stream if member is None else member(stream)
        return manager

    def new_event(self, timing: bool = False) -> Any:
        make = self._member("Event")
        return super().new_event(timing) if make is None else make(enable_timing=timing)

    @property
    def supports_graphs(self) -> bool:
        return self._member("graph") is not None and self._first(*_GRAPHS) is not None

    def new_graph(self) -> Any:
        make = self._first(*_GRAPHS)
        return super().new_graph() if make is None else make()

    def capture(self, graph: Any) -> contextlib.AbstractContextManager[Any]:
        member = self._member("graph")
        if member is None:
            return super().capture(graph)
        manager: contextlib.AbstractContextManager[Any] = member(graph)
        return manager

    # -- memory ----------------------------------------------------------------------------------------------

    def memory_allocated(self, index: int | None = None) -> int:
        # The second name is that of mps.
        return int(self._call("memory_allocated current_allocated_memory", *self._at(index), default=0))

    def max_memory_allocated(self, index: int | None = None) -> int:
        """What is allocated now if the device counts no peak (mps)."""
        member = self._member("max_memory_allocated")
        return self.memory_allocated(index) if member is None else int(member(*self._at(index)))

    def reset_peak_memory_stats(self, index: int | None = None) -> None:
        self._call("reset_peak_memory_stats", *self._at(index))

    def memory_reserved(self, index: int | None = None) -> int:
        member = self._first("memory_reserved", "driver_allocated_memory")
        return self.memory_allocated(index) if member is None else int(member(*self._at(index)))

    def total_memory(self, index: int | None = None) -> int:
        """The host's memory if the device reports none: such a device shares it."""
        if (member := self._member("get_device_properties")) is not None:
            found = getattr(member(self.current_index() if index is None else index), "total_memory", None)
            if found is not None:
                return int(found)
        member = self._member("recommended_max_memory")
        return CpuAccelerator().total_memory() if member is None else int(member())

    def available_memory(self, index: int | None = None) -> int:
        if (member := self._member("mem_get_info")) is not None:
            with contextlib.suppress(RuntimeError):  # not supported by some Intel drivers
                return int(member(*self._at(index))[0])
        return super().available_memory(index)

    def empty_cache(self) -> None:
        self._call("empty_cache")

    def pin(self, tensor: Tensor) -> Tensor:
        if self.device_type == "mps":  # it shares the host's memory
            return tensor
        try:
            return tensor.pin_memory()
        except RuntimeError:  # a PrivateUse1 device need not have pinned memory
            if self.device_type in ("cuda", "xpu"):
                raise
            return tensor

    # -- random numbers --------------------------------------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        member = self._first("manual_seed_all", "manual_seed")
        if member is None:
            self._warn_no_generator("manual_seed_all")
        else:
            member(seed)

    def get_rng_state(self, index: int | None = None) -> Tensor:
        """Empty, with a warning, if the device's module has no generator."""
        member = self._member("get_rng_state")
        if member is None:
            self._warn_no_generator("get_rng_state")
            return torch.empty(0, dtype=torch.uint8)
        state: Tensor = member(*self._at(index))
        return state.cpu()

    def set_rng_state(self, state: Tensor, index: int | None = None) -> None:
        member = self._member("set_rng_state")
        if member is None or state.numel() == 0:
            self._warn_no_generator("set_rng_state")
        else:
            member(state, *self._at(index))

    def _warn_no_generator(self, member: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "torch.%s has no %s: random numbers drawn on the device cannot be reproduced", self.device_type, member
            )

    # -- dtypes ----------------------------------------------------------------------------------

    def supports(self, dtype: torch.dtype) -> bool:
        if dtype == torch.float64:
            return self.device_type != "mps"
        if dtype == torch.bfloat16:
            return self._supports_bf16()
        if dtype == torch.float16:
            return dtype in self._autocast_dtypes(dtype)
        if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):  # ROCm's first fp8 has other formats
            nvidia = self.device_type == "cuda" and not torch.version.hip
            return nvidia and tuple(self._module.get_device_capability()) >= (8, 9)
        return dtype == torch.float32

    def _supports_bf16(self) -> bool:
        if self.device_type == "mps":
            return torch.backends.mps.is_macos_or_newer(14, 0)
        member = self._member("is_bf16_supported")
        if member is None:
            return torch.bfloat16 in self._autocast_dtypes(torch.bfloat16)
        # cuda and xpu count emulation unless told not to; others need not have the argument.
        return bool(member(False) if self.device_type in ("cuda", "xpu") else member())

    def _autocast_dtypes(self, default: torch.dtype) -> list[torch.dtype]:
        """The dtypes that a PrivateUse1 device declares for autocast; `default` if it declares none."""
        member = self._member("get_amp_supported_dtype")
        return [default] if member is None else list(member())


cuda, xpu, mps = (partial(TorchAccelerator, device_type) for device_type in ("cuda", "xpu", "mps"))
"""NVIDIA and (through ROCm) AMD GPUs, Intel GPUs, Apple GPUs."""


def privateuse1() -> TorchAccelerator:
    """The device that an installed package has registered with torch as PrivateUse1."""
    return TorchAccelerator(torch._C._get_privateuse1_backend_name(), name="privateuse1")
