"""Storages of stage 3's states that are in host memory between two phases of a program: see
`offload_states`.

[Note: offloaded states] An offloaded tensor stays the same object, since optimizers, parameters and
views refer to it. Its storage is emptied (``resize_(0)``), which frees device memory, and its bytes
are kept in host memory. To use it then would be a read of freed memory. So
`OffloadedStates.require` is called wherever states are used, and older graphs are made unusable
through the version counters of the parameters.
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


class OffloadDeviceEnum(str, enum.Enum):
    """Where states can be offloaded to."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, enum.Enum):
    """Groups of states: optimizer states, master weights, weights, reduced gradients, buffers of
    gradients.
    """

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


FORWARD = frozenset({OffloadStateTypeEnum.lp_params})
BACKWARD = FORWARD | {OffloadStateTypeEnum.lp_grads, OffloadStateTypeEnum.contiguous_grad_buffer}


@dataclass(frozen=True, slots=True)
class _HostCopy:
    """An emptied storage, and its bytes in host memory."""

    storage: torch.UntypedStorage
    host: Tensor
    kind: OffloadStateTypeEnum
    device: torch.device


class OffloadedStates:
    """The storages of one engine that are offloaded now, and the hooks that refuse to use them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._copies: dict[int, _HostCopy] = {}
        self._event: Any = None
        self._guards: list[Any] = []
        # parameters that are empty now, and their data
        self._hidden: list[tuple[nn.Parameter, Tensor]] = []

    @property
    def kinds(self) -> set[OffloadStateTypeEnum]:
        """The groups of which something is offloaded."""
        return {p.kind for p in self._copies.values()}

    # -- out and back ------------------------------------------------------------------------------

    @torch.no_grad()
    def offload(
        self,
        kind: OffloadStateTypeEnum,
        tensors: Iterable[Tensor],
        *,
        pin: bool,
        non_blocking: bool,
    ) -> None:
        """Move the storages of `tensors` to the host, except those that are there already or
        empty."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or tensor.device.type != self._accelerator.device_type:
                continue
            host = torch.empty(storage.nbytes(), dtype=torch.uint8)
            host = self._accelerator.pin(host) if pin else host
            host.copy_(_bytes(storage, tensor.device), non_blocking=non_blocking)
            # The freed memory may be used by later work of the same stream only, which runs after
            # the copy.
            storage.resize_(0)
            self._copies[storage._cdata] = _HostCopy(storage, host, kind, tensor.device)
        self._event = self._accelerator.new_event()
        self._event.record()
        if not non_blocking:
            self._synchronize()

    @torch.no_grad()
    def reload(self, *, non_blocking: bool) -> None:
        """Move everything back to the device."""
        self._synchronize()
        for copy in self._copies.values():
            copy.storage.resize_(copy.host.numel())
            _bytes(copy.storage, copy.device).copy_(copy.host, non_blocking=non_blocking)
        self._copies.clear()
        for param, data in self._hidden:
            param.data = data
        self._hidden.clear()
        for guard in self._guards:
            guard.remove()
        self._guards.clear()
        if not non_blocking:
            self._accelerator.synchronize()

    def hide(self, params: Iterable[nn.Parameter]) -> None:
        """Make offloaded parameters empty until `reload`, so that using one is a shape error."""
        for param in params:
            if param.numel():
                self._hidden.append((param, param.data))
                param.data = param.data.new_empty(0)

    def _synchronize(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    # -- looking -----------------------------------------------------------------------------------

    def view(self, tensor: Tensor) -> Tensor:
        """`tensor`, or if it is offloaded the same view of its host copy; writes to that are kept
        by `reload`.
        """
        if not self._copies or (copy := self._copies.get(tensor.untyped_storage()._cdata)) is None:
            return tensor
        self._synchronize()
        size = copy.host.numel() // tensor.itemsize * tensor.itemsize
        flat = copy.host[:size].view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def data_of(self, param: nn.Parameter) -> Tensor:
        """The data of `param`, hidden or not."""
        return next((data for hidden, data in self._hidden if hidden is param), param.data)

    # -- guarding ----------------------------------------------------------------------------------

    def install_guards(self, module: nn.Module, optimizer: Any) -> None:
        """Make forwards and optimizer steps that would use offloaded states raise, until
        `reload`."""
        if self._guards or not self._copies:
            return
        for part in module.modules():
            self._guards.append(part.register_forward_pre_hook(self._before_forward, prepend=True))
        if optimizer is not None:
            self._guards.append(
                optimizer.register_step_pre_hook(lambda *_: self.require("the optimizer's step"))
            )

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        self.require("forward", BACKWARD if torch.is_grad_enabled() else FORWARD)

    def require(self, what: str, kinds: frozenset[OffloadStateTypeEnum] | None = None) -> None:
        """Raise UsageError when anything (of `kinds`) is offloaded.

        what: the operation, for the message.
        """
        if self._copies and (missing := self.kinds if kinds is None else self.kinds & kinds):
            names = ", ".join(sorted(k.value for k in missing))
            raise UsageError(
                f"{what} needs {names}, moved to the host by offload_states(); call "
                "reload_states() first"
            )


def _bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    """All of a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
