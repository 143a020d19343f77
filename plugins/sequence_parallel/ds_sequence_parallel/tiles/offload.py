"""Activation offloading: tensors that blocks save for backward are kept in host memory until then.

Copies run beside the computation (`ds_state_stores.HostCopies`). Weights stay, and so do small
tensors. A tensor that several operations save is copied once. Backward fetches a few tensors ahead,
in the reverse order of forward.

With activation checkpointing a block saves its inputs by itself and nothing else: then
``activation_checkpointing.cpu_checkpointing`` is the key to set, and nothing is left here.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from ds_run_state.blocks import find_blocks
from ds_state_stores.host_copies import HostCopies, HostCopy
from torch import Tensor, nn

from ds_core.process import log_once
from ds_sequence_parallel.tiles.tile_model import stand_before

if TYPE_CHECKING:
    from ds_core.accelerator import Accelerator
    from ds_sequence_parallel.config import OffloadConfig

log = logging.getLogger("ds_sequence_parallel")


def offload_blocks(
    model: nn.Module, section: OffloadConfig, accelerator: Accelerator
) -> Callable[[], None]:
    """Offload what the model's repeated blocks save; returns a function that undoes it.

    Raises UsageError where there are none.
    """
    if accelerator.device_type == "cpu":
        log_once(
            log,
            logging.INFO,
            "sequence_parallel.offload_activations has no effect: activations of a CPU are in host "
            "memory",
        )
        return lambda: None
    otherwise = "run parts of it inside ds_sequence_parallel.Offload"
    blocks = find_blocks(model, (), "sequence_parallel.offload_activations", otherwise)
    copies = HostCopies(accelerator, pin_memory=section.pin_memory, in_flight=section.in_flight)
    offload = Offload(copies, min_bytes=section.min_bytes, prefetch=section.prefetch)
    return stand_before({block: OffloadedForward(block, offload) for block in blocks.values()})


class OffloadedForward:
    """Stands before the forward of a block."""

    def __init__(self, block: nn.Module, offload: Offload) -> None:
        self.block = block
        self.offload = offload
        self.__wrapped__ = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The wrapped forward, whose saved inputs go to the host."""
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            # Inside a backward: activation checkpointing repeats the block, and backward needs what
            # it saves at once.
            return self.__wrapped__(*args, **kwargs)
        with self.offload.saving(self.block):
            return self.__wrapped__(*args, **kwargs)


class _Saved:
    """A tensor that was saved, perhaps several times."""

    def __init__(self, copy: HostCopy, before: weakref.ref[_Saved] | None) -> None:
        self.copy = copy
        # The one saved before it, which backward needs next. Weak: autograd alone keeps them.
        self.before = before
        # How often it was saved, and read by backward.
        self.saves = 1
        self.reads = 0
        # On the device, between the first and the last read of a backward.
        self.tensor: Tensor | None = None


class Offload:
    """Moves what is saved for backward ``with offload.saving(module):``.

    min_bytes: smaller tensors stay.
    prefetch: tensors that backward fetches ahead.
    """

    def __init__(self, copies: HostCopies, *, min_bytes: int = 1 << 20, prefetch: int = 2) -> None:
        self.copies = copies
        self._min = min_bytes
        self._ahead = prefetch
        self._last: weakref.ref[_Saved] | None = None
        # What was saved last, with its source, so that its memory has not become another tensor's.
        self._recent: deque[tuple[Any, Tensor, _Saved]] = deque(maxlen=2)

    @contextlib.contextmanager
    def saving(self, module: nn.Module) -> Iterator[None]:
        """Inside, what autograd saves is offloaded; the parameters of `module` stay where they
        are."""
        params = list(module.parameters())

        def pack(tensor: Tensor) -> Any:
            if tensor.numel() * tensor.itemsize < self._min or self.copies.stays(tensor):
                return tensor
            storage = tensor.untyped_storage()._cdata
            # A weight is on the device anyway, also as a view of it (a transposed weight, say).
            if any(p.untyped_storage()._cdata == storage for p in params):
                return tensor
            return self._save(tensor, storage)

        with torch.autograd.graph.saved_tensors_hooks(pack, self._read):
            yield
        # The sources of the last copies would stay on the device.
        self._recent.clear()

    def _save(self, tensor: Tensor, storage: int) -> _Saved:
        key = (
            storage,
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor._version,
        )
        for known, _, saved in self._recent:
            if known == key:
                saved.saves += 1
                return saved
        saved = _Saved(self.copies.out(tensor), self._last)
        self._last = weakref.ref(saved)
        self._recent.append((key, tensor, saved))
        return saved

    def _read(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        # Backward has begun: sources of copies that were still under way are released.
        self.copies.settle()
        if saved.tensor is None:
            saved.tensor = self.copies.back(saved.copy)
        found: Tensor = saved.tensor
        saved.reads += 1
        # A graph that is kept (retain_graph) is read again: counted modulo.
        if saved.reads % saved.saves == 0:
            saved.tensor = None
        for _ in range(self._ahead):
            saved = saved.before() if saved.before is not None else None
            if saved is None:
                break
            if saved.tensor is None:
                self.copies.prefetch(saved.copy)
        return found
