"""One implementation for every device type of torch: cuda, xpu, mps and any PrivateUse1 device.

Each has a device module (``torch.cuda``, ``torch.xpu``, ``torch.<name>``) with similar functions.
Vendors whose device is registered with torch subclass `TorchAccelerator` and override what differs.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from ds_core.accelerator import Accelerator
from ds_core.accelerator.cpu import CpuAccelerator
from ds_core.errors import AcceleratorError


class TorchAccelerator(Accelerator):
    """Drives the devices of ``torch.get_device_module(device_type)``.

    name: the value of ``DS_ACCELERATOR`` that selects it; default: the device type.
    module: replaces torch's module.

    Raises AcceleratorError if torch has no module for the device type.
    """

    def __init__(self, device_type: str, *, name: str = "", module: Any = None) -> None:
        self.device_type = device_type
        self.name = name or device_type
        try:
            self._module = torch.get_device_module(device_type) if module is None else module
        except RuntimeError as error:
            raise AcceleratorError(
                f"torch has no device module for {device_type!r}: {error}"
            ) from error

    @property
    def communication_backend(self) -> str:
        """torch.distributed's default backend for the device type; looked up late, since vendors
        register theirs.
        """
        return torch.distributed.Backend.default_device_backend_map.get(self.device_type, "gloo")

    def _call(self, names: str, default: Any = None) -> Any:
        """Call the first of these functions that the device module has; `default` if it has
        none."""
        found = (getattr(self._module, name, None) for name in names.split())
        member = next(filter(None, found), None)
        return default if member is None else member()

    # -- devices -----------------------------------------------------------------------------------

    def device_count(self) -> int:
        return int(self._module.device_count())

    def set_device(self, index: int) -> None:
        count = self.device_count()
        if not 0 <= index < count:
            have = f"{count} device{'' if count == 1 else 's'}" + (
                f", numbers 0 to {count - 1}" if count > 1 else ""
            )
            raise AcceleratorError(
                f"{self.name} has {have}; there is no number {index} (CUDA_VISIBLE_DEVICES and the "
                "like may hide some)"
            )
        if index != self.current_index():
            self._module.set_device(index)

    def current_index(self) -> int:
        return int(self._call("current_device", default=0))

    # -- streams and events ------------------------------------------------------------------------

    def synchronize(self) -> None:
        self._module.synchronize()

    def new_stream(self) -> Any:
        return self._call("Stream")

    def current_stream(self) -> Any:
        return self._call("current_stream")

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return super().stream(None) if stream is None else self._module.stream(stream)

    def new_event(self, timing: bool = False) -> Any:
        make = getattr(self._module, "Event", None)
        return (
            super().new_event() if make is None else make(enable_timing=True) if timing else make()
        )

    # -- memory ------------------------------------------------------------------------------------

    def memory_allocated(self) -> int:
        # the second name is that of mps
        return int(self._call("memory_allocated current_allocated_memory", default=0))

    def max_memory_allocated(self) -> int:
        """What is allocated now if the device counts no peak (mps)."""
        return int(self._call("max_memory_allocated current_allocated_memory", default=0))

    def reset_peak_memory_stats(self) -> None:
        self._call("reset_peak_memory_stats")

    def total_memory(self) -> int:
        """The host's memory if the device reports none: such a device shares it."""
        if hasattr(self._module, "get_device_properties"):
            return int(self._module.get_device_properties(self.current_index()).total_memory)
        return (
            int(self._call("recommended_max_memory", default=0)) or CpuAccelerator().total_memory()
        )

    def available_memory(self) -> int:
        # mps has none, some Intel drivers do not support it
        with contextlib.suppress(AttributeError, RuntimeError):
            return int(self._module.mem_get_info()[0])
        reserved = self._call("memory_reserved driver_allocated_memory", default=0)
        return max(0, self.total_memory() - int(reserved))

    def empty_cache(self) -> None:
        self._call("empty_cache")

    def pin(self, tensor: Tensor) -> Tensor:
        try:
            return tensor.pin_memory()
        except RuntimeError:
            if self.device_type in ("cuda", "xpu"):
                raise
            # mps shares the host's memory, and a PrivateUse1 device need not have pinned memory
            return tensor

    # -- random numbers and dtypes -----------------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        (getattr(self._module, "manual_seed_all", None) or self._module.manual_seed)(seed)

    def get_rng_state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state()
        return state.cpu()

    def set_rng_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state)

    def supports(self, dtype: torch.dtype) -> bool:
        if dtype == torch.bfloat16 and self.device_type in ("cuda", "xpu"):
            return bool(self._module.is_bf16_supported(False))  # without emulation
        if dtype in (torch.bfloat16, torch.float16):  # a PrivateUse1 device declares what it can
            return dtype in self._call("get_amp_supported_dtype", default=(dtype,))
        return dtype == torch.float32 or (dtype == torch.float64 and self.device_type != "mps")


cuda, xpu, mps = (partial(TorchAccelerator, device_type) for device_type in ("cuda", "xpu", "mps"))
"""NVIDIA and (through ROCm) AMD GPUs, Intel GPUs, Apple GPUs."""


def privateuse1() -> TorchAccelerator:
    """The device that an installed package has registered with torch as PrivateUse1."""
    return TorchAccelerator(torch._C._get_privateuse1_backend_name(), name="privateuse1")
