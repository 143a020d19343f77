"""States of stage 3 moved to host memory between two phases of a program, and back: `offload_states`.

[Note: moved states] A moved tensor stays the same object, since optimizers, parameters and views hold it; only its
storage
is emptied (``resize_(0)``), which gives the device's memory back, and its bytes wait in host memory. Nothing may touch
it then, for that would be a read of freed memory: `Moved.refuse` stands at every door, and graphs that were made
before are made unusable through the version counters of the parameters.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ds_core.errors import UsageError

if TYPE_CHECKING:
    from ds_core.accelerator import Accelerator

__all__ = ["OffloadDeviceEnum", "OffloadStateTypeEnum", "Moved"]


class OffloadDeviceEnum(str, enum.Enum):
    """Where states can be offloaded to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """Groups of states: optimizer states, master weights, weights, reduced gradients, buffers of gradients."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


FORWARD = frozenset({OffloadStateTypeEnum.lp_params})
BACKWARD = FORWARD | {OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer}


@dataclass(frozen=True, slots=True)
class _Copy:
    """storage: emptied. host: its bytes."""

    storage: torch.UntypedStorage
    host: Tensor
    kind: OffloadStateTypeEnum
    device: torch.device


class Moved:
    """The storages of one engine that are in host memory now, and the hooks that stand guard until they are back."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._copies: dict[int, _Copy] = {}
        self._event: Any = None
        self._guards: list[Any] = []
        self._shown: list[tuple[nn.Parameter, Tensor]] = []  # parameters that are empty for now, and what they are else

    @property
    def kinds(self) -> set[OffloadStateTypeEnum]:
        """The groups of which something is moved."""
        return {p.kind for p in self._copies.values()}

    # -- out and back ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def move_out(self, kind: OffloadStateTypeEnum, tensors: Iterable[Tensor], *, pin: bool, non_blocking: bool) -> None:
        """Move the storages of `tensors` to the host; those that are there, or empty, are left as they are."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or not self._accelerator.on_device(tensor):
                continue
            host = torch.empty(storage.nbytes(), dtype=torch.uint8)
            host = self._accelerator.pin(host) if pin else host
            host.copy_(_bytes(storage, tensor.device), non_blocking=non_blocking)
            # Work that is queued behind the copy may get this memory, on the same queue: not before the copy is done.
            storage.resize_(0)
            self._copies[storage._cdata] = _Copy(storage, host, kind, tensor.device)
        self._event = self._accelerator.new_event()
        self._event.record()
        if not non_blocking:
            self._settle()

    @torch.no_grad()
    def bring_back(self, *, non_blocking: bool) -> None:
        """Bring everything back."""
        self._settle()
        for copy in self._copies.values():
            copy.storage.resize_(copy.host.numel())
            _bytes(copy.storage, copy.device).copy_(copy.host, non_blocking=non_blocking)
        self._copies.clear()
        for param, data in self._shown:
            param.data = data
        self._shown.clear()
        for guard in self._guards:
            guard.remove()
        self._guards.clear()
        if not non_blocking:
            self._accelerator.synchronize()

    def hide(self, params: Iterable[nn.Parameter]) -> None:
        """Let parameters that are moved be empty, so that using one is an error of shapes, until `bring_back`."""
        for param in params:
            if param.numel():
                self._shown.append((param, param.data))
                param.data = param.data.new_empty(0)

    def _settle(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    # -- looking ---------------------------------------------------------------------------------------------

    def view(self, tensor: Tensor) -> Tensor:
        """`tensor`, or where it is moved the same view of its host copy; writes to that come back with it."""
        if not self._copies or (copy := self._copies.get(tensor.untyped_storage()._cdata)) is None:
            return tensor
        self._settle()
        size = copy.host.numel() // tensor.itemsize * tensor.itemsize
        flat = copy.host[:size].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def shown(self, param: nn.Parameter) -> Tensor:
        """What `param` is when it is not hidden."""
        return next((data for hidden, data in self._shown if hidden is param), param.data)

    # -- guarding --------------------------------------------------------------------------------------------

    def guard(self, module: nn.Module, optimizer: Any) -> None:
        """Refuse forwards and optimizer steps that would touch what is moved, until `bring_back`."""
        if self._guards or not self._copies:
            return
        for part in module.modules():
            self._guards.append(part.register_forward_pre_hook(self._before_forward, prepend=True))
        if optimizer is not None:
            self._guards.append(optimizer.register_step_pre_hook(lambda *_: self.refuse("the optimizer's step")))

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self.refuse("forward", BACKWARD if torch.is_grad_enabled() else FORWARD)

    def refuse(self, what: str, kinds: frozenset[OffloadStateTypeEnum] | None = None) -> None:
        """Raise UsageError when anything (of `kinds`) is moved."""
        if self._copies and (away := self.kinds if kinds is None else self.kinds & kinds):
            names = ", ".join(sorted(k.value for k in away))
            raise UsageError(f"{what} needs {names}, moved to the host by offload_states(); call reload_states() first")


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """The whole of a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
