"""One back end for every device that torch knows: cuda, xpu, mps and any PrivateUse1 device.

All of them offer a device module (``torch.cuda``, ``torch.xpu``, ``torch.<privateuse1 name>``) of one shape; what a
module lacks gets the answer that costs nothing and breaks nothing.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any

from ds_core.accelerator.contract import Accelerator, BuildFlags
from ds_core.accelerator.cpu import CpuAccelerator, HostEvent
from ds_core.errors import AcceleratorError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["TorchAccelerator", "cuda", "mps", "privateuse1", "xpu"]

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
_TAGS = {"cuda": ("cuda", "triton", "cpp", "reference"), "xpu": ("triton", "cpp", "reference")}
_BACKENDS = {"cuda": "nccl", "xpu": "xccl"}


class TorchAccelerator(Accelerator):
    """Drives the devices of ``torch.get_device_module(device_type)``.

    module: use this in place of torch's own module (tests, and back ends that register late).
    """

    def __init__(self, device_type: str, module: Any = None) -> None:
        import torch

        self.name = self.device_type = device_type
        self._module = module if module is not None else torch.get_device_module(device_type)
        self._host = CpuAccelerator()
        self.visible_devices_env = _VISIBLE.get(device_type, "")
        self.kernel_tags = _TAGS.get(device_type, ("cpp", "reference"))
        self.supports_graphs = device_type == "cuda"

    @property
    def communication_backend(self) -> str:  # type: ignore[override]
        """What torch.distributed uses for these tensors by default."""
        from torch.distributed import Backend

        found = getattr(Backend, "default_device_backend_map", {}).get(self.device_type)
        return str(found or _BACKENDS.get(self.device_type, "gloo"))

    def _call(self, name: str, *arguments: Any, default: Any = None) -> Any:
        function = getattr(self._module, name, None)
        return function(*arguments) if callable(function) else default

    def _at(self, index: int | None) -> tuple[int, ...]:
        return () if index is None else (index,)

    def is_available(self) -> bool:
        return bool(self._call("is_available", default=False))

    def device_count(self) -> int:
        return int(self._call("device_count", default=1 if self.is_available() else 0))

    def set_device(self, index: int) -> None:
        if not 0 <= index < max(1, self.device_count()):
            raise AcceleratorError(f"{self.name} has {self.device_count()} devices; there is no number {index}")
        self._call("set_device", index)

    def current_index(self) -> int:
        return int(self._call("current_device", default=0))

    def device_name(self, index: int | None = None) -> str:
        return str(self._call("get_device_name", *self._at(index), default=self.name))

    def synchronize(self, index: int | None = None) -> None:
        self._call("synchronize", *self._at(index))

    def new_stream(self, priority: int = 0) -> Any:
        make = getattr(self._module, "Stream", None)
        return None if make is None else make(priority=priority) if priority else make()

    def current_stream(self) -> Any:
        return self._call("current_stream")

    def stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        enter = getattr(self._module, "stream", None)
        if stream is None or enter is None:
            return contextlib.nullcontext()
        manager: contextlib.AbstractContextManager[Any] = enter(stream)
        return manager

    def new_event(self, timing: bool = False) -> Any:
        make = getattr(self._module, "Event", None)
        return HostEvent() if make is None else make(enable_timing=timing)

    def memory_allocated(self, index: int | None = None) -> int:
        if hasattr(self._module, "memory_allocated"):
            return int(self._module.memory_allocated(*self._at(index)))
        return int(self._call("current_allocated_memory", default=0))  # mps

    def max_memory_allocated(self, index: int | None = None) -> int:
        return int(self._call("max_memory_allocated", *self._at(index), default=self.memory_allocated(index)))

    def reset_peak_memory_stats(self, index: int | None = None) -> None:
        self._call("reset_peak_memory_stats", *self._at(index))

    def memory_reserved(self, index: int | None = None) -> int:
        if hasattr(self._module, "memory_reserved"):
            return int(self._module.memory_reserved(*self._at(index)))
        return int(self._call("driver_allocated_memory", default=self.memory_allocated(index)))  # mps

    def total_memory(self, index: int | None = None) -> int:
        if hasattr(self._module, "get_device_properties"):
            found = getattr(
                self._module.get_device_properties(self.current_index() if index is None else index),
                "total_memory",
                None,
            )
            if found is not None:
                return int(found)
        return int(self._call("recommended_max_memory", default=self._host.total_memory()))  # mps shares the host's

    def available_memory(self, index: int | None = None) -> int:
        if hasattr(self._module, "mem_get_info"):
            return int(self._module.mem_get_info(*self._at(index))[0])
        return max(0, self.total_memory(index) - self.memory_reserved(index))

    def empty_cache(self) -> None:
        self._call("empty_cache")

    def pin(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        return bool(tensor.is_pinned())

    def manual_seed(self, seed: int) -> None:
        self._call("manual_seed_all" if hasattr(self._module, "manual_seed_all") else "manual_seed", seed)

    def get_rng_state(self, index: int | None = None) -> Tensor:
        where = self._at(index) if self.device_type != "mps" else ()
        state: Tensor = self._module.get_rng_state(*where)
        return state

    def set_rng_state(self, state: Tensor, index: int | None = None) -> None:
        self._module.set_rng_state(state, *(self._at(index) if self.device_type != "mps" else ()))

    def supports(self, dtype: torch.dtype) -> bool:
        import torch

        if dtype == torch.bfloat16:
            return bool(self._call("is_bf16_supported", default=True))
        if dtype == torch.float64:
            return self.device_type != "mps"
        if dtype in (torch.float32, torch.float16):
            return True
        if self.device_type == "cuda" and str(dtype).startswith("torch.float8"):
            return bool(self._module.get_device_capability() >= (8, 9))
        return False

    def build_flags(self) -> BuildFlags:
        if self.device_type != "cuda":
            return super().build_flags()
        named = os.environ.get("TORCH_CUDA_ARCH_LIST")
        if named:
            architectures = tuple(named.replace(";", " ").split())
        elif self.is_available():
            architectures = tuple(
                sorted({"{}.{}".format(*self._module.get_device_capability(i)) for i in range(self.device_count())})
            )
        else:
            architectures = ("8.0", "9.0")
        return BuildFlags(cxx=("-O3", "-std=c++17"), device=("-O3", "--use_fast_math"), architectures=architectures)


def cuda() -> TorchAccelerator:
    """NVIDIA (and ROCm) devices."""
    return TorchAccelerator("cuda")


def xpu() -> TorchAccelerator:
    """Intel devices."""
    return TorchAccelerator("xpu")


def mps() -> TorchAccelerator:
    """Apple devices."""
    return TorchAccelerator("mps")


def privateuse1() -> TorchAccelerator:
    """Whatever device an installed package has registered with torch under its own name."""
    import torch

    return TorchAccelerator(torch._C._get_privateuse1_backend_name())
