"""``deepspeed.accelerator``: ds_core's accelerator under DeepSpeed's names."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_core import accelerator as ours
from ds_core.accelerator import Accelerator, HostEvent

_VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


_TENSORS = {
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32,
    "HalfTensor": torch.float16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}


class DeepSpeedAccelerator:
    """The accelerator of this process.

    `inner` is ds_core's; a call that a CPU has no use for does nothing there.
    """

    def __init__(self, inner: Accelerator) -> None:
        self.inner = inner
        self._name = inner.device_type
        self._communication_backend_name = inner.communication_backend
        self._torch: Any = getattr(torch, inner.device_type, None)

    def __repr__(self) -> str:
        return f"<DeepSpeedAccelerator on {self.inner!r}>"

    @property
    def _on_host(self) -> bool:
        return self._name == "cpu"

    def _at(self, index: int | None) -> contextlib.AbstractContextManager[Any]:
        """A context in which device `index` is the current one; None: it stays as it is."""
        return (
            contextlib.nullcontext()
            if self._on_host or index is None
            else self._torch.device(index)
        )

    # -- what kind of device -----------------------------------------------------------------------

    def is_synchronized_device(self) -> bool:
        """Whether calls have ended when they return."""
        return self._on_host

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = (
        is_synchronized_device
    )

    def is_available(self) -> bool:
        """Whether there is a usable device."""
        return self.inner.device_count() > 0

    def communication_backend_name(self) -> str:
        """torch.distributed's backend for its tensors."""
        return self.inner.communication_backend

    def is_triton_supported(self) -> bool:
        """Whether Triton compiles for it."""
        return self._name in ("cuda", "xpu")

    def get_compile_backend(self) -> str:
        """The default backend of torch.compile."""
        return "inductor"

    def visible_devices_envs(self) -> list[str]:
        """The environment variables that hide devices."""
        return [_VISIBLE[self._name]] if self._name in _VISIBLE else []

    def set_visible_devices_envs(
        self, current_env: dict[str, str], local_accelerator_ids: list[int]
    ) -> None:
        """Write which devices a process sees into its environment."""
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    # -- devices -----------------------------------------------------------------------------------

    def device_name(self, device_index: int | None = None) -> str:
        """``"cuda"``, or with an index ``"cuda:1"``; a CPU is always ``"cpu"``."""
        return (
            self._name if self._on_host or device_index is None else f"{self._name}:{device_index}"
        )

    def device(self, device_index: int | None = None) -> Any:
        """A context in which device `device_index` is the current one."""
        return contextlib.nullcontext() if self._on_host else self._torch.device(device_index)

    def set_device(self, device_index: Any) -> None:
        """Make a device the current one; without effect on the CPU."""
        if not self._on_host:
            self.inner.set_device(
                torch.device(device_index).index if isinstance(device_index, str) else device_index
            )

    def current_device(self) -> int:
        """The index of the current device; on the CPU this process's LOCAL_RANK."""
        return (
            int(os.environ.get("LOCAL_RANK", "0")) if self._on_host else self.inner.current_index()
        )

    def current_device_name(self) -> str:
        """``"cuda:0"``, or ``"cpu"``."""
        return self.device_name(None if self._on_host else self.current_device())

    def device_count(self) -> int:
        """Number of devices; on the CPU the processes of this machine."""
        return (
            int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            if self._on_host
            else self.inner.device_count()
        )

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for all queued work."""
        with self._at(device_index):
            self.inner.synchronize()

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor is on a device of this kind."""
        return tensor.device.type == self.inner.device_type

    # -- random numbers ----------------------------------------------------------------------------

    def random(self) -> Any:
        """The module with torch's generators."""
        return torch.random

    def manual_seed(self, seed: int) -> None:
        """Seed the generators of all devices."""
        self.inner.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """The seed that the generator was given."""
        return torch.initial_seed() if self._on_host else int(self._torch.initial_seed())

    def default_generator(self, device_index: int) -> torch.Generator:
        """The generator of a device."""
        return (
            torch.default_generator
            if self._on_host
            else self._torch.default_generators[device_index]
        )

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """The state of a device's generator."""
        with self._at(device_index):
            return self.inner.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Put a state back."""
        with self._at(device_index):
            self.inner.set_rng_state(new_state)

    # -- streams, events, graphs -------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        """The class of streams; None on the CPU."""
        return None if self._on_host else self._torch.Stream

    @property
    def Event(self) -> Any:
        """Makes events."""
        return (
            (lambda **_: HostEvent(self.inner.synchronize)) if self._on_host else self._torch.Event
        )

    def stream(self, stream: Any) -> Any:
        """A context that queues work on a stream."""
        return self.inner.stream(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        """The current stream; None on the CPU."""
        return self.inner.current_stream()

    def default_stream(self, device_index: int | None = None) -> Any:
        """The default stream; None on the CPU."""
        return None if self._on_host else self._torch.default_stream(device_index)

    def create_graph(self) -> Any:
        """An empty graph; None on the CPU."""
        make = getattr(self._torch, "CUDAGraph", None) or getattr(self._torch, "XPUGraph", None)
        return None if make is None else make()

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        """A context that records work into a graph; without effect on the CPU."""
        return contextlib.nullcontext() if graph is None else self._torch.graph(graph)

    def replay_graph(self, graph: Any) -> None:
        """Run a recorded graph."""
        if graph is not None:
            graph.replay()

    # -- memory ------------------------------------------------------------------------------------

    def empty_cache(self) -> None:
        """Free the allocator's cached memory."""
        self.inner.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of live tensors."""
        with self._at(device_index):
            return self.inner.memory_allocated()

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """Peak of `memory_allocated`."""
        with self._at(device_index):
            return self.inner.max_memory_allocated()

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Reset the peak."""
        with self._at(device_index):
            self.inner.reset_peak_memory_stats()

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that the allocator holds; where torch does not tell it, those of allocated
        memory."""
        if (reserved := getattr(self._torch, "memory_reserved", None)) is not None:
            return int(reserved(device_index))
        return self.memory_allocated(device_index)

    memory_cached = memory_reserved

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """Peak of `memory_reserved`; where torch does not tell it, that of allocated memory."""
        if (peak := getattr(self._torch, "max_memory_reserved", None)) is not None:
            return int(peak(device_index))
        with self._at(device_index):
            return self.inner.max_memory_allocated()

    max_memory_cached = max_memory_reserved

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """torch's statistics; on the CPU those that `memory_allocated` and its peak give."""
        if (stats := getattr(self._torch, "memory_stats", None)) is not None and not self._on_host:
            return dict(stats(device_index))
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device's memory."""
        with self._at(device_index):
            return self.inner.total_memory()

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes that can still be allocated."""
        with self._at(device_index):
            return self.inner.available_memory()

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """A copy in pinned memory; the tensor itself on the CPU."""
        return self.inner.pin(tensor)

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in pinned memory."""
        return not self._on_host and tensor.is_pinned()

    # -- dtypes ------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        """Whether it trains in bfloat16."""
        return self._on_host or self.inner.supports(torch.bfloat16)

    def is_fp16_supported(self) -> bool:
        """Whether it computes in float16."""
        return self.inner.supports(torch.float16)

    def is_fp64_supported(self) -> bool:
        """Whether it computes in float64."""
        return self._name != "mps"

    def __getattr__(self, name: str) -> Any:
        """``FloatTensor`` and its like: functions that make tensors of a dtype on the current
        device.
        """
        if (dtype := _TENSORS.get(name)) is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return functools.partial(torch.tensor, dtype=dtype, device=self.current_device_name())

    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that a model may have."""
        known = {torch.bfloat16: self.is_bf16_supported, torch.float16: self.is_fp16_supported}
        return [torch.float32, *(dtype for dtype, supported in known.items() if supported())]

    def amp(self) -> Any:
        """torch's module of mixed precision for this device."""
        return getattr(self._torch, "amp", torch.amp)

    # -- profiling, and the rest -------------------------------------------------------------------

    def range_push(self, msg: str) -> Any:
        """Begin a range of the profiler, where there is one."""
        return self._torch.nvtx.range_push(msg) if hasattr(self._torch, "nvtx") else None

    def range_pop(self) -> Any:
        """End the latest range."""
        return self._torch.nvtx.range_pop() if hasattr(self._torch, "nvtx") else None

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call when the device is initialised; at once on the CPU."""
        return callback() if self._on_host else self._torch._lazy_call(callback)

    def create_op_builder(self, class_name: str) -> Any:
        """A builder of an operation by the name of its class; None for an unknown one."""
        found = self.get_op_builder(class_name)
        return None if found is None else found()

    def get_op_builder(self, class_name: str) -> Any:
        """The class of a builder; None for an unknown one."""
        from ds_deepspeed_compat.services import op_builder

        return op_builder.BUILDERS.get(class_name)

    def op_builder_dir(self) -> str:
        """The module that has the builders."""
        return "deepspeed.ops.op_builder"


_made: list[DeepSpeedAccelerator] = []  # the latest one, so that code may compare by identity


def get_accelerator() -> DeepSpeedAccelerator:
    """The accelerator of this process; `DS_ACCELERATOR` chooses it, as documented."""
    inner = ours.get_accelerator()
    if not _made or _made[0].inner is not inner:
        _made[:] = [DeepSpeedAccelerator(inner)]
    return _made[0]


def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None:
    """Use another accelerator from now on; one of your own is a plugin
    (docs/plugins/devices.md).
    """
    if not isinstance(accel_obj, DeepSpeedAccelerator):
        raise TypeError(
            f"set_accelerator takes what get_accelerator gives, not {type(accel_obj).__name__}"
        )
    ours.set_accelerator(accel_obj.inner)


def is_current_accelerator_supported() -> bool:
    """Whether the present accelerator is known: always, since it was found."""
    return ours.get_accelerator() is not None
