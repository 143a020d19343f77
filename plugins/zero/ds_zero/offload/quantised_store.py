"""The store of `zero_quantized_nontrainable_weights`: weights that are not trained, in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from ds_state_stores import StateStore, is_evicted
from torch import Tensor

from ds_zero.comm.quantised import WEIGHT_BITS, Coder, Message

if TYPE_CHECKING:
    from ds_core.context import Context


class QuantisedStore(StateStore):
    """Evicted tensors are 8-bit messages on their own device: a quarter of fp32, a half of 16 bits.

    options: ``host``: copies are made in host memory. See `ds_zero.comm.quantised` for messages.
    """

    resident = False

    def __init__(self, ctx: Context, options: Mapping[str, Any]) -> None:
        super().__init__(ctx, options)
        self._coder = Coder(ctx.kernels)
        self._host = bool(options.get("host"))
        # By storage, which lives as long as its tensor: its elements, and the message.
        self._kept: dict[int, tuple[int, Tensor]] = {}

    def copy_in(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """See `StateStore.copy_in`; on the device of `tensor`, unless the options say host."""
        if self._host:
            return super().copy_in(tensor, dtype)
        return tensor.detach().reshape(-1).to(dtype or tensor.dtype, copy=True)

    def fetch(self, tensors: Sequence[Tensor]) -> None:
        """Does nothing: values are decoded when they are waited for."""

    @torch.no_grad()
    def wait(self, tensors: Sequence[Tensor]) -> None:
        """Decode evicted tensors."""
        for tensor in tensors:
            if is_evicted(tensor):
                numel, message = self._kept[_key(tensor)]
                self._coder.decode(Message.of(WEIGHT_BITS, numel), message, _filled(tensor, numel))

    @torch.no_grad()
    def allocate(self, tensors: Sequence[Tensor]) -> None:
        """See `StateStore.allocate`."""
        for tensor in tensors:
            if is_evicted(tensor):
                _filled(tensor, self._kept[_key(tensor)][0])

    @torch.no_grad()
    def evict(self, tensors: Sequence[Tensor], *, changed: bool = True) -> None:
        """Encode what has changed, and free the memory."""
        for tensor in tensors:
            if is_evicted(tensor) or not tensor.numel():
                continue
            storage = tensor.untyped_storage()
            key = _key(tensor)
            if changed or key not in self._kept:
                flat = _flat(tensor, storage.nbytes() // tensor.element_size())
                kind = Message.of(WEIGHT_BITS, flat.numel())
                message = torch.empty(kind.size, dtype=torch.uint8, device=tensor.device)
                self._coder.encode(kind, flat, message)
                self._kept[key] = flat.numel(), message
            storage.resize_(0)

    def discard(self, tensors: Sequence[Tensor]) -> None:
        """See `StateStore.discard`."""
        for tensor in tensors:
            self._kept.pop(_key(tensor), None)

    def kept_bytes(self) -> int:
        """Memory of what is evicted."""
        return sum(message.numel() for _, message in self._kept.values())


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _flat(tensor: Tensor, numel: int) -> Tensor:
    """All of the tensor's storage."""
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), 0, (numel,), (1,))


def _filled(tensor: Tensor, numel: int) -> Tensor:
    """The same, of an evicted tensor, which gets memory."""
    tensor.untyped_storage().resize_(numel * tensor.element_size())
    return _flat(tensor, numel)
