"""One back end for every device that torch knows: cuda, xpu, mps and any PrivateUse1 device.

Each has a device module (``torch.cuda``, ``torch.xpu``, ``torch.<its name>``) of more or less one shape. What a module
lacks is asked of ``torch.accelerator`` if that drives the device, else the contract's own default answers. A vendor
whose device torch knows subclasses `TorchAccelerator` and overrides only what differs.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ds_core.accelerator.contract import Accelerator, BuildFlags
from ds_core.accelerator.cpu import CpuAccelerator
from ds_core.errors import AcceleratorError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["TorchAccelerator", "cuda", "mps", "privateuse1", "xpu"]

log = logging.getLogger("ds_core.accelerator")

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
_TAGS = {"cuda": ("cuda", "triton", "cpp", "reference"), "xpu": ("triton", "cpp", "reference")}
_GRAPHS = ("CUDAGraph", "XPUGraph", "Graph")

# What torch.accelerator calls the members that it can stand in for.
_STAND_IN = {
    "current_device": "current_device_index",
    "current_stream": "current_stream",
    "device_count": "device_count",
    "set_device": "set_device_index",
    "synchronize": "synchronize",
}


class TorchAccelerator(Accelerator):
    """Drives the devices of ``torch.get_device_module(device_type)``.

    name: what ``DS_ACCELERATOR`` calls it, if not the device type. module: use this in place of torch's own module.
    Raises AcceleratorError when torch has no module for the device type.
    """

    def __init__(self, device_type: str, *, name: str = "", module: Any = None) -> None:
        import torch

        self.device_type = device_type
        self.name = name or device_type
        try:
            self._module = torch.get_device_module(device_type) if module is None else module
        except RuntimeError as error:
            raise AcceleratorError(f"torch has no device module for {device_type!r}: {error}") from error
        self.visible_devices_env = _VISIBLE.get(device_type, "")
        self.kernel_tags = _TAGS.get(device_type, Accelerator.kernel_tags)
        self._told = False

    @property
    def communication_backend(self) -> str:
        """What torch.distributed uses for these tensors by default; looked up late, since vendors register theirs."""
        import torch.distributed

        backends = getattr(torch.distributed, "Backend", None)  # torch may be built without distributed
        return str(getattr(backends, "default_device_backend_map", {}).get(self.device_type, "gloo"))

    def _member(self, name: str) -> Callable[..., Any] | None:
        found = getattr(self._module, name, None)
        if found is None and name in _STAND_IN:
            import torch

            current = torch.accelerator.current_accelerator()
            if current is not None and current.type == self.device_type:
                found = getattr(torch.accelerator, _STAND_IN[name], None)
        return found if callable(found) else None

    def _at(self, index: int | None) -> tuple[int, ...]:
        """The index as arguments; mps has one device and takes none."""
        return () if index is None or self.device_type == "mps" else (index,)

    # -- devices ---------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        member = self._member("is_available")
        return self.device_count() > 0 if member is None else bool(member())

    def device_count(self) -> int:
        member = self._member("device_count")
        return 1 if member is None else int(member())

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
        member = self._member("current_device")
        return 0 if member is None else int(member())

    # -- order of work ---------------------------------------------------------------------------------------

    def synchronize(self, index: int | None = None) -> None:
        if (member := self._member("synchronize")) is not None:
            member(*self._at(index))

    def new_stream(self, priority: int = 0) -> Any:
        make = self._member("Stream")
        if make is None:
            return None
        return make(priority=priority) if priority else make()

    def current_stream(self) -> Any:
        # A device whose module makes no streams has one queue to us, so that both answers agree.
        member = self._member("current_stream") if self._member("Stream") is not None else None
        return None if member is None else member()

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
        return self._member("graph") is not None and self._graph_class() is not None

    def _graph_class(self) -> Callable[[], Any] | None:
        return next((made for name in _GRAPHS if (made := self._member(name)) is not None), None)

    def new_graph(self) -> Any:
        make = self._graph_class()
        return super().new_graph() if make is None else make()

    def capture(self, graph: Any) -> contextlib.AbstractContextManager[Any]:
        member = self._member("graph")
        if member is None:
            return super().capture(graph)
        manager: contextlib.AbstractContextManager[Any] = member(graph)
        return manager

    # -- memory ----------------------------------------------------------------------------------------------

    def memory_allocated(self, index: int | None = None) -> int:
        member = self._member("memory_allocated") or self._member("current_allocated_memory")  # the latter is mps's
        return 0 if member is None else int(member(*self._at(index)))

    def max_memory_allocated(self, index: int | None = None) -> int:
        """What is allocated now, where the device keeps no peak (mps)."""
        member = self._member("max_memory_allocated")
        return self.memory_allocated(index) if member is None else int(member(*self._at(index)))

    def reset_peak_memory_stats(self, index: int | None = None) -> None:
        if (member := self._member("reset_peak_memory_stats")) is not None:
            member(*self._at(index))

    def memory_reserved(self, index: int | None = None) -> int:
        member = self._member("memory_reserved") or self._member("driver_allocated_memory")
        return self.memory_allocated(index) if member is None else int(member(*self._at(index)))

    def total_memory(self, index: int | None = None) -> int:
        """The host's memory where the device tells nothing: such a device shares it."""
        if (member := self._member("get_device_properties")) is not None:
            found = getattr(member(self.current_index() if index is None else index), "total_memory", None)
            if found is not None:
                return int(found)
        member = self._member("recommended_max_memory")
        return CpuAccelerator().total_memory() if member is None else int(member())

    def available_memory(self, index: int | None = None) -> int:
        if (member := self._member("mem_get_info")) is not None:
            with contextlib.suppress(RuntimeError):  # some Intel drivers cannot tell
                return int(member(*self._at(index))[0])
        return super().available_memory(index)

    def empty_cache(self) -> None:
        if (member := self._member("empty_cache")) is not None:
            member()

    def pin(self, tensor: Tensor) -> Tensor:
        if self.device_type == "mps":  # its memory is the host's own
            return tensor
        if self.device_type in ("cuda", "xpu"):
            return tensor.pin_memory()
        with contextlib.suppress(RuntimeError):  # a PrivateUse1 device need not have page-locked memory
            return tensor.pin_memory()
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return bool(tensor.is_pinned())

    # -- random numbers --------------------------------------------------------------------------------------

    def manual_seed(self, seed: int) -> None:
        member = self._member("manual_seed_all") or self._member("manual_seed")
        if member is None:
            self._tell_no_generator("manual_seed_all")
        else:
            member(seed)

    def get_rng_state(self, index: int | None = None) -> Tensor:
        """Empty, after a warning, where the device's module has no generator to ask."""
        import torch

        member = self._member("get_rng_state")
        if member is None:
            self._tell_no_generator("get_rng_state")
            return torch.empty(0, dtype=torch.uint8)
        state: Tensor = member(*self._at(index))
        return state.cpu()

    def set_rng_state(self, state: Tensor, index: int | None = None) -> None:
        member = self._member("set_rng_state")
        if member is None or state.numel() == 0:
            self._tell_no_generator("set_rng_state")
        else:
            member(state, *self._at(index))

    def _tell_no_generator(self, member: str) -> None:
        if not self._told:
            self._told = True
            log.warning(
                "torch.%s has no %s: random numbers drawn on the device cannot be reproduced", self.device_type, member
            )

    # -- dtypes and kernels ----------------------------------------------------------------------------------

    def supports(self, dtype: torch.dtype) -> bool:
        import torch

        if dtype == torch.float64:
            return self.device_type != "mps"
        if dtype == torch.bfloat16:
            return self._supports_bf16()
        if dtype == torch.float16:
            return dtype in self._autocast_dtypes(dtype)
        if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):  # ROCm's first fp8 is of another kind
            return self.device_type == "cuda" and not torch.version.hip and self._capability() >= (8, 9)
        return dtype == torch.float32

    def _supports_bf16(self) -> bool:
        import torch

        if self.device_type == "mps":
            return torch.backends.mps.is_macos_or_newer(14, 0)
        member = self._member("is_bf16_supported")
        if member is None:
            return torch.bfloat16 in self._autocast_dtypes(torch.bfloat16)
        # cuda and xpu count emulation unless told not to; others need not know the question.
        return bool(member(False) if self.device_type in ("cuda", "xpu") else member())

    def _autocast_dtypes(self, default: torch.dtype) -> list[torch.dtype]:
        """The dtypes that a PrivateUse1 device declares for autocast; `default` where it declares nothing."""
        member = self._member("get_amp_supported_dtype")
        return [default] if member is None else list(member())

    def _capability(self) -> tuple[int, int]:
        major, minor = self._module.get_device_capability()
        return int(major), int(minor)

    def build_flags(self) -> BuildFlags:
        """For cuda: TORCH_CUDA_ARCH_LIST (PYTORCH_ROCM_ARCH), else what the visible devices are."""
        if self.device_type != "cuda":
            return super().build_flags()
        import torch

        rocm = bool(torch.version.hip)
        named = os.environ.get("PYTORCH_ROCM_ARCH" if rocm else "TORCH_CUDA_ARCH_LIST", "")
        architectures = set(named.replace(";", " ").split())
        if not architectures:
            for index in range(self.device_count()):
                if rocm:
                    architectures.add(str(self._module.get_device_properties(index).gcnArchName).partition(":")[0])
                else:
                    architectures.add("{}.{}".format(*self._module.get_device_capability(index)))
        return BuildFlags(cxx=("-O3",), device=("-O3",), architectures=tuple(sorted(architectures)))


def cuda() -> TorchAccelerator:
    """NVIDIA's and, through ROCm, AMD's devices."""
    return TorchAccelerator("cuda")


def xpu() -> TorchAccelerator:
    """Intel's devices."""
    return TorchAccelerator("xpu")


def mps() -> TorchAccelerator:
    """Apple's devices."""
    return TorchAccelerator("mps")


def privateuse1() -> TorchAccelerator:
    """Whatever device an installed package has registered with torch under its own name."""
    import torch

    return TorchAccelerator(torch._C._get_privateuse1_backend_name(), name="privateuse1")
